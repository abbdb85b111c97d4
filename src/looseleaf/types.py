"""The few types every part shares: the attention state, what a score is made of, how a query turns.

Nothing here computes. The protocols have one method each, so that a policy can be written in one
file and tested with a lambda."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


class AttnState(NamedTuple):
    """Attention of some rows over some set of keys, in the form that can be merged.

    ``out`` is the softmax-weighted mean of the values, ``[rows, num_qo_heads, head_dim]``; ``lse``
    the natural-log sum of exponentiated scores, fp32, ``[rows, num_qo_heads]``. The empty set is
    ``(0, -inf)``, the unit of the merge."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Rotation:
    """The table by which queries and keys turn: unscaled cosines and sines, one row a position.

    ``cos`` and ``sin`` are fp32 ``[positions, rotary_dim // 2]``; dims past ``rotary_dim`` pass
    through. ``interleaved`` pairs dims ``(2i, 2i + 1)`` (GPT-J), otherwise ``(i, i + rotary_dim //
    2)`` (NeoX). An attention factor (YaRN, LongRoPE) is not in here: it belongs to the softmax
    scale, squared."""

    cos: Float[Tensor, "positions half_rotary_dim"]
    sin: Float[Tensor, "positions half_rotary_dim"]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]


@dataclass(frozen=True)
class ScoreRule:
    """How the score of a query row and a key comes about, once both stand in the same frame.

    ``score = cap(softmax_scale * q.k) - slope * (query_position - key_position)``, where ``cap(x) =
    soft_cap * tanh(x / soft_cap)`` if ``soft_cap`` is not 0. With a ``window`` other than 0 a row
    sees only keys less than ``window`` positions behind it. ``alibi_slopes`` is fp32
    ``[num_qo_heads]`` or None. Positions are true positions in the sequence, never page slots."""

    softmax_scale: float
    soft_cap: float = 0.0
    window: int = 0
    alibi_slopes: Float[Tensor, "heads"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but the scale."""
        return not (self.window or self.soft_cap or self.alibi_slopes is not None)


@runtime_checkable
class Attend(Protocol):
    """What a model calls for attention; it knows nothing of what is behind."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep this step's keys and values, and attend.

        ``q`` is ``[rows, num_qo_heads, head_dim]``, ``k`` and ``v`` ``[rows, num_kv_heads,
        head_dim]``, all unrotated. Returns ``[rows, num_qo_heads, head_dim]`` in the dtype of
        ``q``. In the last layer ``q`` may hold only the rows whose logits are asked for, if the
        step was made knowing which; ``k`` and ``v`` are always those of all rows."""
        ...


LayerHook = Callable[[int, Tensor], Tensor]
"""Called before each layer with its index and the hidden states ``[rows, hidden_size]``; what it
returns, possibly fewer rows, is what the layer computes. Blend narrows the rows through it.
"""
