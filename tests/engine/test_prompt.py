"""From documents to tokens: once for each that its owner holds, and as ever for any other."""

import gc
from collections.abc import Callable

import pytest

from looseleaf import LLM
from looseleaf.errors import InvalidRequest
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.llm.load import reference_model
from looseleaf.models import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, DocumentPart, Prompt
from tests.checkpoints import make_checkpoint

TEXT = "The ferry to Ostrava leaves at nine."


class Counted(Tokenizer):
    """Counts the texts of documents that it is given."""

    encoded = 0

    def encode_document(self, text: str, after: int | None = None) -> list[int]:
        self.encoded += 1
        return super().encode_document(text, after)


@pytest.fixture(scope="module")
def tokenizer() -> Counted:
    return Counted(reference_model())


@pytest.fixture
def builder(tokenizer: Counted) -> PromptBuilder:
    tokenizer.encoded = 0
    return PromptBuilder(tokenizer, tokenizer.vocab_size)


def tokens_of(builder: PromptBuilder, document: Document) -> tuple[int, ...]:
    (found,) = (p for p in builder.from_parts([document, "When?"]) if isinstance(p, DocumentPart))
    return found.tokens


@pytest.mark.parametrize("text", [TEXT, [TEXT, "It is full."]])
def test_a_document_that_is_held_is_tokenized_once(
    builder: PromptBuilder, tokenizer: Counted, text: str | list[str]
) -> None:
    document, again = Document(text), Document(text)
    first = tokens_of(builder, document)
    once = tokenizer.encoded
    assert once == len(document.texts)
    assert tokens_of(builder, document) == first and tokenizer.encoded == once
    # another one of the same text is nobody else's
    assert tokens_of(builder, again) == first and tokenizer.encoded == 2 * once


def test_what_documents_became_goes_with_them(builder: PromptBuilder) -> None:
    documents = [Document(f"{TEXT} {n}") for n in range(3)]
    builder.from_parts([*documents, "When?"])
    assert len(builder._encoded) == 3
    del documents[1:]
    gc.collect()
    assert len(builder._encoded) == 1


Ids = Callable[[list[int]], object]


@pytest.mark.parametrize("ids", [list, tuple, lambda ids: [True, *ids[1:]]])
def test_token_ids_of_all_kinds_are_taken(builder: PromptBuilder, ids: Ids) -> None:
    (text,) = builder.from_parts([ids([1, 5, 7])])  # type: ignore[list-item]
    assert text.tokens[-3:] == (1, 5, 7)
    assert all(type(token) is int for token in text.tokens)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_an_id_outside_of_the_vocabulary_is_refused(builder: PromptBuilder, token: int) -> None:
    with pytest.raises(InvalidRequest, match="outside the model's vocabulary"):
        builder.from_parts([[1, token]])
    with pytest.raises(InvalidRequest, match="outside the model's vocabulary"):
        builder.from_parts([Document(TEXT, token_ids=(1, token)), "When?"])


def test_what_is_made_of_a_document_once_is_that_of_each_prompt_it_is_in(
    builder: PromptBuilder,
) -> None:
    document = Document(TEXT)

    def part(lead: str) -> DocumentPart:
        prompt = builder.from_parts([lead, document, "When?"])
        return next(part for part in prompt if isinstance(part, DocumentPart))

    short, long = part("Read: "), part("Read all of this and then answer: ")
    assert short.ids is long.ids and short.ids.tolist() == list(short.tokens)
    spaces = [KeySpace(SegmentKey(bytes([n])), SegmentKey(b"shared")) for n in range(20)]
    for _ in range(2):
        # more than are kept, under salts and behind leads of their own
        for keys in spaces:
            for context in (keys.root, SegmentKey(b"lead")):
                expected = keys.document(context, short.tokens)
                assert short.key_behind(keys, context) == expected
                assert long.key_behind(keys, context) == expected


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model that has fewer tokens than its tokenizer, as one whose embeddings were not resized:
    it knows all bytes, and no merges."""
    folder = make_checkpoint(tmp_path_factory.mktemp("grown"), vocab_size=5 + 256)
    return LLM(folder, device="cpu", num_pages=40)


MISSING = r"the text has the token 'Ġtravel' \(id \d+\), and the model has 261 tokens: leave it out"


@pytest.mark.parametrize(
    "prompt", ["a travel", ["a", Document("a travel"), "b"], [Document("a"), "a travel"]]
)
def test_a_token_that_the_model_does_not_have_is_named_before_anything_runs(
    prompt: Prompt, grown: LLM
) -> None:
    with pytest.raises(InvalidRequest, match=MISSING):
        grown.generate([prompt])
    assert not grown.engine.has_work
    (answer,) = grown.generate(["zq"])
    assert answer.outputs[0].token_ids


def test_so_it_is_in_messages_and_documents_and_system_prompts(grown: LLM) -> None:
    prompts = grown.engine.prompts
    for parts in (["a travel"], [Document("a travel"), "b"]):
        with pytest.raises(InvalidRequest, match=MISSING):
            prompts.from_messages([{"role": "user", "content": parts}])
    with pytest.raises(InvalidRequest, match=MISSING):
        prompts.from_document(Document("a travel"))
    with pytest.raises(InvalidRequest, match=MISSING):
        prompts.from_document(Document("zq"), system="a travel")
    with pytest.raises(InvalidRequest, match=MISSING):
        prompts.system_prompt("a travel")
