"""The position of an output in a compiled grammar, and its token masks."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from looseleaf.errors import InvalidRequest
from looseleaf.sandbox.grammars import first_line

_MAX_REASON = 200


class GrammarState:
    """The position of an output in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, origin: "CompiledGrammar") -> None:
        self._matcher = matcher
        self._origin = origin
        self._mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._vocab_size = vocab_size

    @property
    def accepting(self) -> bool:
        """Whether the text may end."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text must end."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Bool[Tensor, "vocab"]:
        """The mask of the tokens that may follow, with end tokens if the text may end.

        Raises InvalidRequest if the grammar exceeds the library's limits."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits.view(np.bool_))

    def begin(self, token_ids: list[int]) -> bool:
        """Append the first tokens; returns whether the grammar allows them all."""
        return bool(self._matcher.try_consume_tokens(token_ids) == len(token_ids))

    def push(self, token_id: int) -> None:
        """Append a token. Raises InvalidRequest if the grammar does not allow it."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            # all outputs of a compiled grammar share the library's limits
            self._origin.is_spent = True
            reason = short_reason(self._matcher.get_error())
            raise InvalidRequest(
                f"the output can't go on as its grammar asks ({reason}): "
                "simplify the grammar, or check that logit_bias leaves it a token"
            )


class CompiledGrammar:
    """A grammar over a vocabulary. ``is_spent`` is set once an output exceeds a limit."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.is_spent = False

    def start(self) -> GrammarState:
        """The state at the beginning of an output."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self)


def short_reason(error: Any) -> str:
    """The first sentence of a library error, cut to a bounded length."""
    first = first_line(error)
    return first if len(first) <= _MAX_REASON else first[:_MAX_REASON] + "…"
