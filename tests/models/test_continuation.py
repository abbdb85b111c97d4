"""The law of all tokenizers: tokens of parts are those of the text that the parts make together."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from looseleaf.models import Tokenizer
from tests.models.kinds import KINDS, write_kind

BEGIN, END = 1, 2
texts = st.text(st.sampled_from("ab é😀z"), min_size=1, max_size=6)
Both = tuple[Tokenizer, Backend]


@pytest.fixture(scope="session", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A tokenizer of each kind, ours and the library's own."""
    folder = write_kind(tmp_path_factory.mktemp("kind"), request.param)
    return Tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))


@given(first=texts, second=texts)
@example(first="a", second="é")
@example(first="é", second="ab")
@example(first="é", second=" ab")
def test_text_in_the_middle_has_the_tokens_that_it_has_there(
    first: str, second: str, both: Both
) -> None:
    tokenizer, backend = both
    whole = backend.encode(first + second, add_special_tokens=False)
    spans, cut = whole.offsets, len(first)
    # tokens of which one lies in both texts are no matter of the law
    assume(all(end <= cut or start >= cut for start, end in spans))
    behind = tokenizer.encode_continuation(second)
    assert behind == [i for i, (start, _) in zip(whole.ids, spans, strict=True) if start >= cut]
    assert tokenizer.encode(first) + behind == whole.ids


@given(pieces=st.lists(texts, min_size=1, max_size=4))
def test_parts_joined_are_the_exact_text(pieces: list[str], both: Both) -> None:
    tokenizer, backend = both
    first, *behind = pieces
    ids = tokenizer.encode(first)
    for piece in behind:
        ids += tokenizer.encode_continuation(piece)
    whole = "".join(pieces)
    own = backend.decode(backend.encode(whole, add_special_tokens=False).ids)
    assert tokenizer.decode(ids) == own
    # at its beginning alone a text may gain or lose a space, as in the library
    assert own in (whole, whole.removeprefix(" "), f" {whole}")


@given(first=texts, second=texts)
def test_text_behind_a_marker_has_the_tokens_that_it_has_there(
    first: str, second: str, both: Both
) -> None:
    tokenizer, backend = both
    whole = backend.encode(f"{first}</s>{second}", add_special_tokens=False).ids
    before = [*tokenizer.encode(first), END]
    assert before + tokenizer.encode_continuation(second, after=END) == whole


@given(first=texts, second=texts)
def test_a_marker_behind_text_in_the_middle_is_read_as_elsewhere(
    first: str, second: str, both: Both
) -> None:
    tokenizer, _ = both
    ids = tokenizer.encode_continuation(f"{first}</s>{second}", special=True)
    behind = tokenizer.encode_continuation(second, after=END)
    assert ids == [*tokenizer.encode_continuation(first), END, *behind]
    plain = tokenizer.encode_continuation(f"{first}</s>")
    assert END not in plain
    assert tokenizer.decode(tokenizer.encode("a") + plain).endswith(f"{first}</s>")
