"""Outputs of a random model under a grammar: any token that the grammar allows may come next."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.engine.sampling.grammar_state import GrammarState
from looseleaf.models import Tokenizer
from looseleaf.sampling_params import Grammar
from tests.models.kinds import write_kind

# ends of strings, arrays and objects come soon
_LIKELY = dict.fromkeys(b'"}]', 40.0) | dict.fromkeys(b"ab,.0123456789", 6.0) | {ord("\\"): 4.0}
_MOST = 300


class RandomModel:
    """Draws outputs of single bytes; ``compiler`` is that of its tokenizer."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer(write_kind(folder, "byte level"))
        self._bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._weights = [
            _LIKELY.get(piece[0], 1.0) if len(piece) == 1 and i > 2 else 0.0
            for i, piece in enumerate(self._bytes)
        ]
        self.compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def draw(self, grammar: Grammar, seed: int) -> str | None:
        """An output, None if it did not end in time. Raises InvalidRequest as a request does."""
        state, rng, output = self.compiler.start(grammar, ""), random.Random(seed), b""
        while not state.complete:
            if len(output) > _MOST:
                return None
            token = _next(state, rng, lambda i: self._weights[i])
            if token is None:
                break
            state.push(token)
            output += self._bytes[token]
        return output.decode()


def _next(state: GrammarState, rng: random.Random, weight: Callable[[int], float]) -> int | None:
    ids: list[int] = state.allowed().nonzero().flatten().tolist()
    weights = [weight(i) for i in ids]
    if state.accepting and (not any(weights) or rng.random() < 0.5):
        return None
    return rng.choices(ids, weights)[0]


def fits(schema: Any, value: Any) -> bool:
    """Whether a validator that knows nothing of grammars accepts ``value``."""
    import jsonschema_rs

    return bool(jsonschema_rs.validator_for(schema, validate_formats=False).is_valid(value))
