"""A segment key depends on everything that determines stored keys and values, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf import SamplingParams
from looseleaf.engine.sequence import Sequence
from looseleaf.kv.keys import KeySpace, SegmentKey
from looseleaf.prompt.request import DocumentPart, Request, TextPart

SPACE: dict[str, Any] = {
    "model": b"model",
    "rope": b"rope",
    "kv_dtype": "torch.float32",
    "salt": "",
    "page_size": 16,
}
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
KINDS = ("document", "text_page", "text_end")


def space(**changes: Any) -> KeySpace:
    return KeySpace.create(**{**SPACE, **changes})


def sequence(*parts: TextPart | DocumentPart, keys: KeySpace | None = None) -> Sequence:
    request = Request("request", parts, SamplingParams())
    return Sequence(request, 0, keys or space(), 16)


@pytest.mark.parametrize("shared", [False, True])
def test_pages_together_have_the_keys_that_each_has_alone(shared: bool) -> None:
    keys = space().salted("tenant")
    one = keys.shared_page if shared else keys.text_page
    tokens, context, expected = list(range(100, 155)), keys.root, []
    for start in (0, 16, 32):
        context = one(context, tokens[start : start + 16])
        expected.append(context)
    assert keys.text_pages(keys.root, tokens, 16, shared=shared) == expected
    assert keys.text_pages(keys.root, tokens[:15], 16, shared=shared) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model": b"other"},
        {"rope": b"other"},
        {"kv_dtype": "torch.bfloat16"},
        {"salt": "tenant"},
        {"page_size": 32},
        {"model": b"modelrope", "rope": b""},
        {"model": b"", "rope": b"modelrope"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_changes_stored_keys_changes_every_segment_key(
    kind: str, change: dict[str, Any]
) -> None:
    mine, other = space(), space(**change)
    assert mine.root != other.root
    # even behind the same context: the space itself is part of each key
    assert getattr(mine, kind)(mine.root, [1, 2]) != getattr(other, kind)(mine.root, [1, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_requests_salt_joins_the_engines_in_every_key(kind: str) -> None:
    spaces = [space(), space(salt="a"), space().salted("a"), space(salt="a").salted("a")]
    spaces += [space().salted("b"), space().salted("a").salted("b"), space(salt="b").salted("a")]
    context = space().root
    assert len({getattr(keys, kind)(context, [1, 2]) for keys in spaces}) == len(spaces)
    assert space().salted("") == space()


def test_pages_of_the_service_are_the_same_under_every_salt_and_no_further() -> None:
    text = tuple(range(48))
    pages = []
    for salt in ("", "one", "two"):
        request = Request("request", (TextPart(text, num_shared=40),), SamplingParams(), salt=salt)
        tail = (made := Sequence(request, 0, space(), 16)).tail
        pages.append([tail.page_key(n, made.keys, 16) for n in range(3)])
        own = Sequence(
            Request("own", (TextPart(text),), SamplingParams(), salt=salt), 0, space(), 16
        )
        assert (own.tail.page_key(0, own.keys, 16) == pages[0][0]) == (salt == "")
    first, second, third = (set(column) for column in zip(*pages, strict=True))
    assert (len(first), len(second), len(third)) == (1, 1, 3)


def test_the_same_inputs_give_the_same_key_in_every_process() -> None:
    assert space() == space()
    # tiers store segments under these names: a change orphans stored segments
    expected = "20322bd4"
    assert space().document(space().root, [1, 2, 3]).hex()[:8] == expected


@given(first=TOKENS, second=TOKENS)
def test_different_tokens_or_contexts_give_different_keys(
    first: list[int], second: list[int]
) -> None:
    keys = space()
    made: dict[SegmentKey, object] = {}
    contexts = [keys.root, keys.document(keys.root, first), keys.text_page(keys.root, second)]
    for context in set(contexts):
        for kind in KINDS:
            for tokens in {tuple(first), tuple(second)}:
                inputs = (kind, context, tokens)
                assert made.setdefault(getattr(keys, kind)(context, tokens), inputs) == inputs


@given(tokens=TOKENS, cut=st.integers(0, 5))
def test_how_tokens_are_cut_into_parts_shows_in_the_key(tokens: list[int], cut: int) -> None:
    keys = space()
    left, right = tokens[:cut], tokens[cut:]
    once = keys.document(keys.root, tokens)
    twice = keys.document(keys.document(keys.root, left), right)
    assert once != twice


def test_a_placed_document_is_known_by_context_document_and_policy() -> None:
    keys = space()
    a, b = keys.document(keys.root, [1]), keys.document(keys.root, [2])
    made = {
        keys.placed(keys.root, a),
        keys.placed(keys.root, b),
        keys.placed(a, b),
        keys.placed(b, a),
        keys.placed(a, b, b"ratio 0.2"),
    }
    assert len(made) == 5


def test_a_documents_key_never_names_its_position() -> None:
    lead, document = TextPart((1, 2)), DocumentPart((7, 8, 9), 2, "a")
    other, end = DocumentPart(tuple(range(30)), 2, "b"), TextPart((3,))
    early = sequence(lead, document, other, end)
    late = sequence(lead, other, TextPart((5, 5, 5)), document, end)
    assert early.documents[0].start != late.documents[1].start
    assert early.documents[0].key == late.documents[1].key
    assert early.documents[1].key == late.documents[0].key


def test_a_documents_key_depends_on_exactly_the_context_it_is_encoded_in() -> None:
    def key(lead: tuple[int, ...], context_length: int) -> SegmentKey:
        document = DocumentPart((7, 8, 9), context_length, "a")
        return sequence(TextPart(lead), document, TextPart((3,))).documents[0].key

    assert key((1, 2, 3), 3) != key((1, 2, 4), 3)
    assert key((1, 2, 3), 2) == key((1, 2, 4), 2)
    assert key((1, 2, 3), 2) != key((1, 2, 3), 3)
    assert key((1, 2, 3), 0) == key((4,), 0)


def test_a_text_page_is_known_by_everything_before_it() -> None:
    keys, text = space(), tuple(range(32))

    def page_key(*before: TextPart | DocumentPart) -> SegmentKey:
        tail = sequence(*before, TextPart(text)).tail
        return tail.page_key(0, keys, 16)

    a, b = DocumentPart((7, 8), 0, "a"), DocumentPart((9,), 0, "b")
    variants = {page_key(), page_key(a), page_key(b), page_key(a, b), page_key(b, a)}
    assert len(variants) == 5
    assert page_key(a, b) == page_key(DocumentPart((7, 8), 0, "renamed"), b)


def test_later_pages_of_a_run_chain_to_earlier_ones() -> None:
    keys = space()
    mine = sequence(TextPart(tuple(range(40)))).tail
    other = sequence(TextPart((99, *range(1, 40)))).tail
    assert mine.tokens[16:] == other.tokens[16:]
    assert mine.page_key(1, keys, 16) != other.page_key(1, keys, 16)
