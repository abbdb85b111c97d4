"""A prompt of documents in the context of the prompt has the tokens of the text it is, whatever the
tokenizer does to beginnings; all prompts decode to the exact text."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import ChatTemplate
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, Prompt, PromptParts
from tests.models.kinds import KINDS, write_kind

BOS, END = 1, 2
TEMPLATE = "{% for m in messages %}<s>b {{ m['content'] }}</s>{% endfor %}b"
Joined = tuple[PromptBuilder, Backend]


@pytest.fixture(scope="module", params=KINDS)
def joined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Joined:
    folder: Path = write_kind(tmp_path_factory.mktemp("kind"), request.param)
    tokenizer = Tokenizer(folder)
    tokenizer.document_template = "{text}"
    tokenizer._chat_templates["default"] = ChatTemplate(TEMPLATE)
    return PromptBuilder(tokenizer, tokenizer.vocab_size), Backend.from_file(
        str(folder / "tokenizer.json")
    )


def tokens(parts: PromptParts) -> list[int]:
    return [token for part in parts for token in part.tokens]


def read(text: str) -> Document:
    return Document(text, context="prompt")


# spaces begin words where a tokenizer cuts anyway: the law is not about tokens across parts
PROMPTS: list[tuple[Prompt, str]] = [
    (["ab", read("éz"), "é a"], "abézé a"),
    ([read("ab"), "é a", read(" b"), "é"], "abé a bé"),
    (["</s>", read("ab"), "é"], "</s>abé"),
    (["ab", "é a", "é"], "abé aé"),
    ([[5, END], "ab"], "</s>ab"),
]


@pytest.mark.parametrize(("prompt", "text"), PROMPTS)
def test_parts_of_a_prompt_have_the_tokens_of_the_joined_text(
    prompt: Prompt, text: str, joined: Joined
) -> None:
    builder, backend = joined
    expected = backend.encode(text, add_special_tokens=False).ids
    found = tokens(builder.from_parts(prompt))
    first = 5 if isinstance(prompt[0], list) else BOS
    assert found == [first, *expected]


@pytest.mark.parametrize("content", [["é", "DOC", "é a"], ["DOC", "é"], ["é", "DOC"]])
def test_so_they_have_in_a_chat(content: list[str], joined: Joined) -> None:
    builder, backend = joined
    parts = [read("éz") if part == "DOC" else part for part in content]
    found = tokens(builder.from_messages([{"role": "user", "content": parts}]))
    text = TEMPLATE.partition("%}")[2].partition("{%")[0]
    whole = text.replace("{{ m['content'] }}", "".join(content).replace("DOC", "éz")) + "b"
    assert found == backend.encode(whole, add_special_tokens=False).ids


def test_documents_and_the_text_around_them_are_read_as_the_exact_text(joined: Joined) -> None:
    builder, _ = joined
    for context in ("lead", "alone", "prompt"):
        first, second = Document("ab", context=context), Document(["a b", "z"], context=context)
        found = tokens(builder.from_parts(["a ", first, "é", second, " b"]))
        assert builder.tokenizer.decode(found).removeprefix(" ") == "a abéa bz b"
        # the same tokens in any other place that is not behind a marker
        behind = tokens(builder.from_parts(["a ", second, "é", first, "b"]))
        assert builder.tokenizer.decode(behind).removeprefix(" ") == "a a bzéabb"
