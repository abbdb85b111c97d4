"""Grammars: the sandbox job that compiles them with llguidance, and the library's limits.

A compiled grammar can't be sent between processes. The job checks that a grammar compiles and
takes its first step within the limits; then the parent compiles it again.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

# the library's default limits allow steps that are ten times slower
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


def make(setup: dict[str, Any]) -> Callable[[str], str]:
    """The job of a vocabulary: from a grammar's source to the library's error, or ""."""
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
    """The compiled grammar under the limits; after an error its ``is_error()`` is true."""
    import llguidance

    limits = llguidance.LLParserLimits(**_LIMITS)
    return llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)


def first_line(error: Any) -> str:
    """The sentence of a library error, without its dump of state and advice on options."""
    first, *rest = str(error).strip().splitlines() or [""]
    if first.endswith(":"):
        # parse errors quote the text before the message
        first += "".join(f" {line}" for line in rest if line.startswith("error: "))
    return first.partition(" Enable '")[0]


class _Words:
    """A vocabulary in llguidance's protocol, which prescribes the attribute names."""

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
    """An encoder by longest match that stops at the first byte without a token.

    It never uses ``special`` ids."""
    ids = {token: i for i, token in enumerate(tokens) if token and i not in special}
    longest = max(map(len, ids), default=1)

    def encode(text: str | bytes) -> list[int]:
        content = text.encode() if isinstance(text, str) else text
        token_ids: list[int] = []
        start = 0
        while start < len(content):
            ends = range(min(len(content), start + longest), start, -1)
            end = next((end for end in ends if content[start:end] in ids), None)
            if end is None:
                break
            token_ids.append(ids[content[start:end]])
            start = end
        return token_ids

    return encode
