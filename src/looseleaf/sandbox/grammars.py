"""Grammars: the job that compiles one by llguidance in a process, and the limits of that library.

A compiled grammar can't be sent between processes. The job proves that a grammar compiles, and that
its first step ends, within its limits; then its caller compiles it again, in about the same time.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

# a step that stops there takes some 5 ms over 128,000 tokens, with the library's own 30 to 100
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


def make(setup: dict[str, Any]) -> Callable[[str], str]:
    """The job of a vocabulary: a request is the source of a grammar, its value the error of the
    library, empty if it has none."""
    import llguidance

    words = _Words(setup)
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=setup["ends"])

    def job(source: str) -> str:
        matcher = make_matcher(vocabulary, source)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return first_line(matcher.get_error()) if matcher.is_error() else ""

    return job


def make_matcher(vocabulary: Any, source: str) -> Any:
    """The compiled grammar, under the limits; an error is its state."""
    import llguidance

    limits = llguidance.LLParserLimits(**_LIMITS)
    return llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)


def first_line(error: Any) -> str:
    """The library's sentence without the state that it shows behind it, and without its options."""
    first, *rest = str(error).strip().splitlines() or [""]
    if first.endswith(":"):
        # a parser quotes the text first, and says at the end what is wrong with it
        first += "".join(f" {line}" for line in rest if line.startswith("error: "))
    return first.partition(" Enable '")[0]


class _Words:
    """A vocabulary as llguidance wants it; its attribute names are not ours."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.eos_token_id, self.bos_token_id = setup["ends"][0], setup["bos"]
        self.tokens = [text.encode("latin-1") for text in setup["tokens"]]
        self.special_token_ids = setup["special"]
        self._longest_first = greedy_encoder(self.tokens, {*self.special_token_ids})

    def __call__(self, text: str | bytes) -> list[int]:
        return self._longest_first(text)


def greedy_encoder(
    tokens: Sequence[bytes], special: Collection[int]
) -> Callable[[str | bytes], list[int]]:
    """Encodes texts by the longest token that fits next, up to the first byte without a token.

    Tokens whose ids are ``special`` are never used."""
    ids = {token: i for i, token in enumerate(tokens) if token and i not in special}
    longest = max(map(len, ids), default=1)

    def encode(text: str | bytes) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        encoded: list[int] = []
        start = 0
        while start < len(rest):
            ends = range(min(len(rest), start + longest), start, -1)
            end = next((end for end in ends if rest[start:end] in ids), None)
            if end is None:
                break
            encoded.append(ids[rest[start:end]])
            start = end
        return encoded

    return encode
