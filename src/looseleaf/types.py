"""Types that all packages share: attention state, rotation table, score rule, model hooks."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


class AttnState(NamedTuple):
    """Attention of rows over a set of keys, in mergeable form.

    ``out`` is the softmax-weighted mean of the values, ``[rows, num_qo_heads, head_dim]``; ``lse``
    is the natural log of the sum of exponentiated scores, fp32, ``[rows, num_qo_heads]``. The state
    of an empty set is ``(0, -inf)``, the unit of the merge."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Rotation:
    """The RoPE table of queries and keys: unscaled cosines and sines, one row per position.

    ``cos`` and ``sin`` are fp32 ``[positions, rotary_dim // 2]``; dims past ``rotary_dim`` are not
    rotated. ``interleaved`` pairs dims ``(2i, 2i + 1)`` (GPT-J), otherwise ``(i, i + rotary_dim //
    2)`` (NeoX). The softmax scale contains the squared attention factor (YaRN, LongRoPE)."""

    cos: Float[Tensor, "positions half_rotary_dim"]
    sin: Float[Tensor, "positions half_rotary_dim"]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]


@dataclass(frozen=True)
class ScoreRule:
    """The score of a query row and a key that are rotated in the same frame.

    ``score = cap(softmax_scale * q.k) - slope * (query_position - key_position)``, where ``cap(x) =
    soft_cap * tanh(x / soft_cap)`` if ``soft_cap`` is not 0. With a ``window`` other than 0 a row
    sees only the last ``window`` positions, its own included. ``alibi_slopes`` is fp32
    ``[num_qo_heads]`` or None. Positions are those in the sequence, not page slots.

    ``sinks`` (fp32 ``[num_qo_heads]`` or None) are the logits of one more key per row, whose value
    is 0. It belongs to no set of keys: operators over key sets ignore it, and
    `looseleaf.ops.add_sinks` merges it once into the final state of a row. Rules that differ in
    sinks only are equal."""

    softmax_scale: float
    soft_cap: float = 0.0
    window: int = 0
    alibi_slopes: Float[Tensor, "heads"] | None = None
    sinks: Float[Tensor, "heads"] | None = field(default=None, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether the score of a key is only the scaled product."""
        return not (self.window or self.soft_cap or self.alibi_slopes is not None)


@runtime_checkable
class Attend(Protocol):
    """The attention function that a model calls."""

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store the keys and values of this step and attend.

        ``q`` is ``[rows, num_qo_heads, head_dim]``, ``k`` and ``v`` ``[rows, num_kv_heads,
        head_dim]``, all unrotated. Returns ``[rows, num_qo_heads, head_dim]`` in the dtype of
        ``q``. In the last layer ``q`` may be limited to the step's logit rows; ``k`` and ``v``
        always have all rows. They are None for a layer that reads what another layer stores.

        Latent attention passes the keys as ``v``, too. Its output has no values in the rotated
        dims."""
        ...


class AttentionCall(NamedTuple):
    """A layer's attention in C: the address of its function, and its arguments.

    It returns 0 or the number of a fault."""

    function: int
    plan: ctypes.Structure
    tensors: ctypes.Structure
    phases: int


@runtime_checkable
class NativeAttend(Attend, Protocol):
    """The attention of a step that C code may call."""

    def calls(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Sequence[AttentionCall] | None:
        """The calls of all layers, each over the content of these tensors at that time; None if a
        layer has work outside of C. Valid during the step, as long as the tensors live."""
        ...

    def require(self, fault: int) -> None:
        """Raises InvalidOption unless ``fault``, the result of a call, is 0."""
        ...


Expand = Callable[[Tensor, slice], Tensor]
"""Keys and values ``[2, heads, keys, dims]`` of a slice of heads, from stored keys ``[keys,
key_dim]``. The first dims of keys are the rotated dims, those of values are 0."""


@runtime_checkable
class ExpandingAttend(Attend, Protocol):
    """The attention of a step whose last rows may attend to keys expanded from latents."""

    def num_expanded(self, layer: int) -> int:
        """The number of last rows that attend to expanded keys in ``layer``; the call with the
        step's keys has no queries of them and precedes `attend_expanded`."""
        ...

    def attend_expanded(self, layer: int, q: Tensor, expand: Expand) -> Tensor:
        """The output ``[rows, heads, dims]`` of these rows, for unrotated queries in the dims of
        expanded keys."""
        ...


LayerHook = Callable[[int, Tensor], Tensor]
"""Called before each layer with its index and the hidden states ``[rows, hidden_size]``. Returns
the layer's input, possibly of fewer rows; blending selects rows with it.
"""
