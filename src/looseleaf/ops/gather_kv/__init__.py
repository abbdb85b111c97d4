"""Keys and values of scattered pages laid out in the order of a prompt, keys turned to where they
stand there.

Rows that read many keys in several frames turn once a frame, and begin anew at every border of two
(docs/frames.md). Laid out once a layer, the same keys are one span in the frame of the prompt:
what it costs is to copy them, which memory does as fast whether or not they turn."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.gather_kv.reference import gather_kv_reference
from looseleaf.types import Rotation

GATHERED_SIZE = 128
"""Slots of a page that keys are gathered to: those of a tile, so that a tile is one copy."""
UNUSED = -2
"""The source of a slot that is left alone."""


@dataclass(frozen=True)
class KeySources:
    """Where the key of each slot of the gathered pages comes from: ``slots`` are flat (``page *
    page_size + slot``) slots of the pages that are read, -1 where there is none, and ``turns`` the
    Δ of the frame in which that key is stored, at least 0: keys turn forward only."""

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
    """Write ``rotate(k, turns)`` and ``v`` of ``sources.slots`` to the leading slots of the
    gathered pages, in place.

    Turning is done in fp32 and adds up: a key stored at ``p`` of a frame at Δ comes out as one
    stored at ``Δ + p``, rounded once more. Slots without a source become zeros; those whose source
    is `UNUSED` and those past the sources are left alone. Raises InvalidOption for a key that is to
    turn back; on a GPU nobody looks, since looking would wait for the device."""
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
