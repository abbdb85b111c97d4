"""State of revised outputs between steps: seen-sets and the output cache.

The output cache holds the attention state of every row in a window over the sealed pages that it
has read. The row at position ``p`` uses index ``p % window``, so nothing moves when rows enter or
leave. States are fp32, since many merges would round in fewer bits. The size depends on the window,
not on an output's length; only the registers have a byte a page."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.types import AttnState


@dataclass(frozen=True)
class StateShape:
    """Sizes of a model whose outputs are revised."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    device: torch.device


class RevisionStates:
    """The states of all outputs with one ``window``; an output has a slot from `take` to `free`.

    ``registers`` is uint8 ``[layers, slots, kv_heads, pages]``, ``out`` fp32 ``[layers, slots,
    window, qo_heads, head_dim]``, and ``lse`` lacks its last axis. ``booked`` is int64 ``[layers,
    slots, kv_heads]``, the position of the last recorded newest row. Growth replaces the tensors.
    """

    def __init__(self, shape: StateShape, window: int) -> None:
        self.window = window
        layers, device = shape.num_layers, shape.device
        states = (layers, 0, window, shape.num_qo_heads)
        self.registers: UInt8[Tensor, "layers slots kv_heads pages"] = torch.zeros(
            layers, 0, shape.num_kv_heads, 0, dtype=torch.uint8, device=device
        )
        self.out: Tensor = torch.zeros(*states, shape.head_dim, device=device)
        self.lse: Tensor = torch.zeros(states, device=device)
        self.booked: Tensor = torch.zeros(
            layers, 0, shape.num_kv_heads, dtype=torch.int64, device=device
        )
        self._free: list[int] = []

    def take(self) -> int:
        """A slot for an output: its pages are unread, its states undefined."""
        if not self._free:
            slots = self.registers.shape[1]
            more = max(4, slots)
            self.registers = _grown(self.registers, 1, more)
            self.out, self.lse = _grown(self.out, 1, more), _grown(self.lse, 1, more)
            self.booked = _grown(self.booked, 1, more)
            self._free = list(range(slots + more - 1, slots - 1, -1))
        slot = self._free.pop()
        self.booked[:, slot] = -1
        self.registers[:, slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Release the slot of an output."""
        assert slot not in self._free, "a slot was freed twice"
        self._free.append(slot)

    def make_room(self, num_pages: int) -> None:
        """Enlarge the registers to ``num_pages`` pages of an output."""
        pages = self.registers.shape[3]
        if num_pages > pages:
            self.registers = _grown(self.registers, 3, max(num_pages, 2 * pages, 64) - pages)

    def carried(
        self, layer: int, slots: Int[Tensor, " rows"], indices: Int[Tensor, " rows"]
    ) -> AttnState:
        """The cached states of rows, ``[rows, qo_heads, …]``."""
        return AttnState(self.out[layer, slots, indices], self.lse[layer, slots, indices])

    def keep(
        self,
        layer: int,
        slots: Int[Tensor, " rows"],
        indices: Int[Tensor, " rows"],
        out: Float[Tensor, "rows qo_heads head_dim"],
        lse: Float[Tensor, "rows qo_heads"],
    ) -> None:
        """Store the states of rows for the next step."""
        self.out[layer, slots, indices], self.lse[layer, slots, indices] = out.float(), lse.float()


def _grown(tensor: Tensor, dim: int, more: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
