"""Which templates run in the caller's process, and that it makes no difference to their text."""

import pytest

from looseleaf.errors import InvalidRequest
from looseleaf.models.tokenizer.chat_template import ChatTemplate
from looseleaf.sandbox.plain_templates import plain_nodes

PLAIN = [
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}go{% endif %}",
    "{% for m in messages[1:] %}{% if loop.index0 % 2 == 0 %}{{ m.content | trim }}{% else %}"
    "{{ m.content.strip() ~ loop.index }}{% endif %}{% else %}none{% endfor %}",
    "{% set first = messages[0]['content'] %}{{ first | upper }}{{ messages | tojson(indent=2) }}",
    "{% for m in messages if m.role in ['user', 'system'] %}{% generation %}{{ m.role }}"
    "{% endgeneration %}{% endfor %}{{ tools | default('no tools', true) }}",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x",
]

BEYOND = {
    "loops-in-loops": "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}",
    "a-range": "{% for a in range(9) %}{% endfor %}",
    "characters": "{% for a in messages[0].content %}{% endfor %}",
    "doubling": "{% set a = 'x' %}{% set a = a ~ a %}",
    "sums": "{% set a = b + c %}",
    "a-namespace": "{% set n = namespace(a='x') %}{% set n.a = n.a ~ n.a %}",
    "a-product": "{{ 'x' * 9 }}",
    "a-power": "{{ 9 ** 9 }}",
    "a-format": "{{ '%2000000000d' % 1 }}",
    "a-format-of-a-loop": "{% for loop in messages %}{{ loop.index % 2 }}{% endfor %}",
    "format": "{{ '{:>9}'.format(1) }}",
    "center": "{{ 'x' | center(9) }}",
    "indent": "{{ messages | tojson(indent=1000000) }}",
    "json-of-json": "{{ messages | tojson | string | tojson }}",
    "a-width": "{{ strftime_now('%2000000000d') }}",
    "words": "{{ lipsum(n=9) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a-recursive-loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "strip-of-text": "{{ messages[0].content.strip(messages[1].content) }}",
    "lists": "{{ [messages, messages] }}",
    "unknown-method": "{{ messages[0].content.zfill(9) }}",
    "other-messages": "{% set messages = tools %}{% for m in messages %}{% endfor %}",
    "an-error": "{% for",
}
MESSAGES = [
    {"role": "user", "content": " Who \ud800?"},
    {"role": "assistant", "content": '«"\\»'},
    {"role": "user", "content": ""},
]


@pytest.mark.parametrize("source", PLAIN)
def test_a_plain_template_writes_the_same_in_a_process(source: str) -> None:
    nodes = plain_nodes(source)
    assert nodes is not None
    template = ChatTemplate(source)
    named = {"bos_token": "<s>", "tools": None}
    here = template.render_once(MESSAGES, named)
    assert template.sandbox.pids == []
    assert template.sandbox.call({"messages": MESSAGES, **named}) == here
    # more work than a caller waits for
    many = [{"role": "user", "content": "x" * 1000}] * 5000
    template.render_once(many, named)
    assert len(template.sandbox.pids) == 1
    template.sandbox.close()


@pytest.mark.parametrize("source", BEYOND.values(), ids=BEYOND.keys())
def test_a_template_whose_form_bounds_no_work_is_not_plain(source: str) -> None:
    assert plain_nodes(source) is None


def test_a_template_says_the_same_of_a_conversation_that_it_refuses() -> None:
    refusal = "{% if messages[0]['role'] == 'user' %}{{ raise_exception('no users') }}{% endif %}"
    said = []
    for source in (refusal, "{% set a = 'x' * 2 %}" + refusal):
        template = ChatTemplate(source)
        with pytest.raises(InvalidRequest) as caught:
            template.render(MESSAGES)
        said.append(str(caught.value))
        template.sandbox.close()
    assert said == ["this model's chat template refuses the conversation: no users"] * 2
