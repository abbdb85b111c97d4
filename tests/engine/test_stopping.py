"""Outputs end where the request says, and no part of a stop string is ever streamed."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import SamplingParams
from looseleaf.engine.sampling.stopping import Finish, StopChecker

EOS = 2


def checker(*, limit: int = 100, **options: object) -> StopChecker:
    params = SamplingParams(**{"max_tokens": None, **options})  # type: ignore[arg-type]
    return StopChecker(params, max_tokens=limit, eos_token_ids=(EOS,))


def stream(check: StopChecker, pieces: list[str]) -> list[str]:
    """What is streamed after each piece of text, until the output ends."""
    deltas = []
    for piece in pieces:
        before = check.visible_text
        finish = check.push(7, piece)
        assert check.visible_text.startswith(before)
        deltas.append(check.visible_text[len(before) :])
        if finish:
            break
    return deltas


def cut_as_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The law, on the whole text: the stop string that is complete first ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


tokens = st.lists(st.text("abc", max_size=3), max_size=12)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=3), max_size=3)


@settings(max_examples=300)
@given(tokens, stop_strings, st.booleans())
def test_stop_strings_cut_the_text_however_it_is_split(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    check = checker(stop=stops, include_stop_str_in_output=include)
    streamed = "".join(stream(check, pieces))
    if check.finish is None:
        check.close("length")
    assert check.visible_text.startswith(streamed)
    text, stop = cut_as_text("".join(pieces), stops, include)
    if stop is not None and include:
        # what follows a stop string within the same token is cut as well
        assert text.endswith(stop)
    assert check.visible_text == check.text == text
    assert check.finish == (Finish("stop", stop) if stop else Finish("length"))


@settings(max_examples=300)
@given(tokens, stop_strings)
def test_held_back_text_is_the_longest_beginning_of_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    check = checker(stop=stops)
    streamed = "".join(stream(check, pieces))
    if check.finish is None:
        held = check.text[len(streamed) :]
        begins = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((b for b in begins if check.text.endswith(b)), key=len, default="")
        assert held == longest


def test_a_stop_string_across_tokens_never_leaks() -> None:
    check = checker(stop="\n\nQuestion:")
    assert stream(check, ["Yes.", "\n", "\nQues", "tion", ": who"]) == ["Yes.", "", "", "", ""]
    assert check.text == "Yes."
    assert check.finish == Finish("stop", "\n\nQuestion:")


def test_the_longest_possible_beginning_is_held() -> None:
    check = checker(stop=("aab",))
    assert stream(check, ["xaa", "a", "b"]) == ["x", "a", ""]
    assert check.text == "xa"


def test_text_held_in_vain_is_streamed_with_the_next_token() -> None:
    check = checker(stop=("STOP",))
    assert stream(check, ["a ST", "O", "RM"]) == ["a ", "", "STORM"]


def test_end_of_sequence_ends_the_output_and_gives_no_text() -> None:
    check = checker()
    assert check.push(5, "Hello") is None
    assert check.push(EOS, "</s>") == Finish("stop")
    assert check.text == "Hello"


def test_ignore_eos_goes_on_but_stop_ids_still_hold() -> None:
    check = checker(ignore_eos=True, stop_token_ids=[9])
    assert check.push(EOS, "") is None
    assert check.push(9, "!") == Finish("stop", 9)
    assert check.text == ""


def test_a_stop_token_gives_text_if_the_request_includes_it() -> None:
    check = checker(stop_token_ids=[9], include_stop_str_in_output=True)
    assert check.push(9, "!") == Finish("stop", 9)
    assert check.text == "!"


def test_length_ends_the_output_and_releases_what_is_held() -> None:
    check = checker(limit=2, stop="STOP")
    assert check.push(5, "a") is None
    assert check.push(5, "ST") == Finish("length")
    assert check.visible_text == "aST"


def test_a_stop_in_the_last_allowed_token_is_a_stop() -> None:
    assert checker(limit=1).push(EOS, "") == Finish("stop")
    assert checker(limit=1, stop="x").push(5, "x") == Finish("stop", "x")


def test_before_min_tokens_no_stop_string_counts() -> None:
    check = checker(min_tokens=2, stop="x")
    assert stream(check, ["x", "x"]) == ["x", "x"]
    assert check.push(5, "ax") == Finish("stop", "x")
    assert check.text == "xxa"


def test_a_stop_string_that_ends_after_min_tokens_counts_whole() -> None:
    check = checker(min_tokens=1, stop="END")
    assert stream(check, ["the EN", "D"]) == ["the ", ""]
    assert check.finish == Finish("stop", "END")


def test_an_aborted_output_keeps_its_text() -> None:
    check = checker(stop="STOP")
    check.push(5, "a ST")
    assert check.close() == Finish("abort")
    assert check.visible_text == "a ST"
    assert check.close("length") == Finish("abort")


def test_nothing_follows_the_end() -> None:
    check = checker()
    check.push(EOS, "")
    with pytest.raises(ValueError, match="has ended"):
        check.push(5, "more")


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", max_size=6), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=9), max_size=3),
)
def test_what_is_held_back_does_not_depend_on_stop_strings_that_did_not_count(
    pieces: list[str], stops: list[str]
) -> None:
    check = checker(stop=stops, min_tokens=100, limit=200)
    for piece in pieces:
        check.push(7, piece)
        begins = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((b for b in begins if check.text.endswith(b)), key=len, default="")
        assert check.visible_text + longest == check.text


@pytest.mark.parametrize("piece", [" word", "xxxxx", "x" * 100 + "y"])
def test_long_stop_strings_cost_a_token_little(piece: str) -> None:
    stops = [chr(ord("A") + n) + "x" * 1023 for n in range(15)] + ["x" * 1023 + "!"]
    check = checker(stop=stops, limit=10_000)
    start = time.process_time()
    for _ in range(1000):
        check.push(7, piece)
        check.visible_text  # noqa: B018
    # with each beginning of each of them tried it takes many seconds
    assert time.process_time() - start < 1
