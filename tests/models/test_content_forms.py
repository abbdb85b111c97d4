"""A message's text reaches the model in the form that the template reads, or is refused."""

from pathlib import Path
from typing import Any

import pytest

from looseleaf.errors import InvalidRequest
from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import ChatTemplate
from tests.models.texts import load


def each(content: str) -> str:
    """A template that writes ``content`` of each message ``m`` behind its role."""
    return "{% for m in messages %}<|{{ m.role }}|>" + content + "<|end|>{% endfor %}"


FORMS = {
    "string": "{{ m.content }}",
    "stripped": "{{ m.content | trim }}",
    "first part": "{{ m['content'][0]['text'] }}",
    "first part, stripped": "{{ m['content'][0]['text'].strip() }}",
    "all parts": "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}",
    "both": "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}",
    "system as string": "{% if m.role == 'system' %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}",
    "system must be string": "{% if m.role == 'system' %}{{ 'Rules: ' + m.content }}{% else %}"
    "{{ m.content[0].text.strip() }}{% endif %}",
    "escaped": "{{ m.content | tojson }}",
    "reasoning left out": "{% if m.role == 'assistant' %}{{ m.content.split('|think|')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
    "no system": "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.content[0].text }}",
}
USER = [{"role": "user", "content": "Who signs?"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "let me see|think|Nobody."},
    {"role": "user", "content": ["  When\n", {"type": "document"}, '"then"?']},
]


@pytest.mark.parametrize("form", FORMS)
def test_two_messages_that_differ_give_tokens_that_differ(form: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template=each(FORMS[form]))
    chat = CHAT[1:] if form == "no system" else CHAT
    # a request first shows roles one by one, as requests do
    for messages in (USER, chat):
        runs = tokenizer.encode_chat(messages)
        for number, message in enumerate(messages):
            other = {**message, "content": "Another!"}
            changed = [*messages[:number], other, *messages[number + 1 :]]
            assert tokenizer.encode_chat(changed) != runs
    assert len(tokenizer.encode_chat(chat)) == 2
    written = tokenizer.render_chat(chat)
    assert "'type'" not in written and "'text'" not in written


def test_a_template_that_refuses_system_messages_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template=each(FORMS["no system"]))
    with pytest.raises(InvalidRequest, match="refuses the conversation: no system role"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", CHAT,
         "leaves system messages out"),
        ("{{ messages[0].content }}", CHAT, "leaves (users'|assistant) messages out"),
        ("{{ messages[-1].content[0].text }}", CHAT, "leaves (system|assistant) messages out"),
        ("{{ bos_token }}", USER, "leaves users' messages out"),
        ("{{ messages[0].text }}", USER, "use another chat template"),
    ],
)  # fmt: skip
def test_text_that_is_in_neither_form_is_refused(
    source: str, messages: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, chat_template=source)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=words):
            tokenizer.render_chat(messages)


def test_a_role_that_is_read_in_one_place_may_be_left_out_in_another(tmp_path: Path) -> None:
    source = "{% for m in messages[:2] %}{{ m.content }}{% endfor %}"
    tokenizer: Tokenizer = load(tmp_path, chat_template=source)
    assert tokenizer.render_chat(USER) == "Who signs?"
    with pytest.raises(InvalidRequest, match="leaves users' messages out"):
        tokenizer.render_chat([*USER, *USER, {"role": "user", "content": "In which room?"}])


def test_a_template_is_rendered_once_a_request_when_its_form_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate(each(FORMS["all parts"]))
    render, calls = template.render_once, []

    def counted(*given: Any) -> str:
        calls.append(given)
        return render(*given)

    monkeypatch.setattr(template, "render_once", counted)
    template.render(USER)
    probed = len(calls)
    for _ in range(3):
        template.render(USER)
    assert len(calls) == probed + 3
