"""Rotate this step's keys into their frames and scatter keys and values to pages, in one launch.

``slots`` are flat: ``page * page_size + slot``; a negative slot is padding and writes nothing, so
that a captured graph can run with fewer rows than its capacity."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.store_kv.reference import store_kv_reference
from looseleaf.types import Rotation


class NewRows(NamedTuple):
    """Keys and values of a step, and where they go."""

    k: Float[Tensor, "tokens kv_heads head_dim"]
    v: Float[Tensor, "tokens kv_heads head_dim"]
    frame_positions: Int[Tensor, " tokens"]
    slots: Int[Tensor, " tokens"]
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"]
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"]


def store_kv(
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    frame_positions: Int[Tensor, " tokens"],
    slots: Int[Tensor, " tokens"],
    rotation: Rotation,
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"],
    implementation: Implementation = "auto",
) -> None:
    """Write ``rotate(k, frame_positions)`` and ``v`` to ``slots`` of the pages, in place.

    Slots are distinct; the pages' dtype may differ from that of ``k`` and is what is stored: e4m3
    saturates. Positions and slots are read while the launch before still runs: who computes them on
    the device has another one stand in between.
    """
    if choose(implementation, k) == "triton":
        from looseleaf.ops.store_kv.kernel import store_kv_triton

        store_kv_triton(k, v, frame_positions, slots, rotation, k_pages, v_pages)
    else:
        store_kv_reference(k, v, frame_positions, slots, rotation, k_pages, v_pages)
