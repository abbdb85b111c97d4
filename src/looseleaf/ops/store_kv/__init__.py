"""Rotates a step's keys into their frames and writes keys and values to pages, in one launch.

``slots`` are flat: ``page * page_size + slot``. A negative slot is padding and writes nothing, so
that a CUDA graph runs with fewer rows than its capacity."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.store_kv.reference import store_kv_reference
from looseleaf.types import Rotation


class NewRows(NamedTuple):
    """Keys and values of a step, and their slots: the tensors of `store_kv`."""

    k: Float[Tensor, "tokens kv_heads head_dim"]
    v: Float[Tensor, "tokens kv_heads head_dim"]
    frame_positions: Int[Tensor, " tokens"]
    slots: Int[Tensor, " tokens"]
    k_pages: Float[Tensor, "pages kv_heads page_size head_dim"]
    v_pages: Float[Tensor, "pages kv_heads page_size head_dim"]

    def store(self, rotation: Rotation, implementation: Implementation = "auto") -> None:
        """Writes the rows, as `store_kv`."""
        store_kv(
            self.k, self.v, self.frame_positions, self.slots, rotation, self.k_pages, self.v_pages,
            implementation,
        )  # fmt: skip


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
    """Writes ``rotate(k, frame_positions)`` and ``v`` to ``slots`` of the pages, in place.

    ``v`` is not written if both pages are the same memory: the keys are the values.

    Slots are distinct. The pages may have another dtype than ``k``; e4m3 saturates. The kernel
    reads positions and slots while the previous kernel still runs: a kernel that writes them needs
    another launch in between. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, k) == "triton":
        from looseleaf.ops.store_kv.kernel import store_kv_triton

        store_kv_triton(k, v, frame_positions, slots, rotation, k_pages, v_pages)
    else:
        store_kv_reference(k, v, frame_positions, slots, rotation, k_pages, v_pages)
