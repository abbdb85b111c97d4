"""Copies keys and values of scattered pages into prompt order, with the keys rotated on the way.

Attention over spans in several frames rotates its queries once per frame and stalls at every border
between spans (docs/frames.md). After one copy per layer, the same keys are one span in the frame of
the prompt. The rotation is free, since the copy is bound by memory."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.gather_kv.reference import gather_kv_reference
from looseleaf.types import Rotation

GATHERED_SIZE = 128
"""Slots of a gathered page: one tile, so that one TMA copy loads a tile."""
UNUSED = -2
"""Source of a slot that is not written."""


@dataclass(frozen=True)
class KeySources:
    """The source of each slot of the gathered pages.

    ``slots`` are flat source slots (``page * page_size + slot``); -1 means no source. ``turns`` is
    Δ, the offset of the frame in which the key is stored; it is >= 0, since keys are rotated
    forward only."""

    slots: Int[Tensor, " keys"]
    turns: Int[Tensor, " keys"]


def gather_kv(
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    sources: KeySources,
    rotation: Rotation,
    k_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    v_gathered: Float[Tensor, "gathered kv_heads gathered_size head_dim"],
    implementation: Implementation = "auto",
) -> None:
    """Writes ``rotate(k, turns)`` and ``v`` of ``sources.slots`` to the first slots of the gathered
    pages. Values are not written if both gathered pages are the same memory.

    The rotation is in fp32. A key stored at ``p`` in a frame at Δ becomes a key at ``Δ + p``, with
    one more rounding. Slots with source -1 become zeros; slots with source `UNUSED`, and slots
    after the last source, are not written. The gathered pages may have another dtype than the
    source pages. Raises InvalidOption for a negative Δ; a GPU does not check, since the check would
    wait for the device."""
    slots, turns = sources.slots, sources.turns
    if not slots.is_cuda and bool(((slots >= 0) & (turns < 0)).any()):
        raise InvalidOption(
            "a key can't be gathered from a frame at a negative offset: leave the span as it is, "
            "which turns the query"
        )
    if choose(implementation, k_pages) == "triton":
        from looseleaf.ops.gather_kv.kernel import gather_kv_triton

        gather_kv_triton(k_pages, v_pages, sources, rotation, k_gathered, v_gathered)
    else:
        gather_kv_reference(k_pages, v_pages, slots, turns, rotation, k_gathered, v_gathered)
