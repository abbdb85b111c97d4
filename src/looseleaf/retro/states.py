"""State of revised outputs between steps: seen-sets and the output cache.

The output cache holds the attention state of every row in a window over the sealed pages that it
has read. The row at position ``p`` uses index ``p % window``, so nothing moves when rows enter or
leave. States are fp32, since many merges would round in fewer bits. The size depends on the window,
not on an output's length; only the registers have a byte a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from looseleaf.attention.plan.lists import IntArray
from looseleaf.attention.select.policy import RevisedRow, SelectingRow
from looseleaf.attention.select.worklist_fill import power_of_two
from looseleaf.ops.merge_states import KeptStates
from looseleaf.ops.select_pages import SeenPages
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

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the tensors; growth replaces them."""
        tensors = self.registers, self.booked, self.out, self.lse
        return tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)

    def newly_sealed(self, rows: Sequence[SelectingRow]) -> list[int]:
        """The candidates that past rows take over, for each row."""
        return [revised(row).newly_sealed for row in rows]

    def by_output(self, rows: Sequence[SelectingRow], indices: Sequence[int]) -> IntArray:
        """The step row ``[outputs, width]`` of each output and age, -1 for none.

        The width is a power of two, at most the window, because each width has its own graphs."""
        states = [revised(row) for row in rows]
        order = {row.slot: n for n, row in enumerate(row for row in states if row.age == 0)}
        width = min(self.window, power_of_two(1 + max(row.age for row in states)))
        table = np.full((len(order), width), -1, np.int32)
        for index, row in zip(indices, states, strict=True):
            table[order[row.slot], row.age] = index
        return table

    def numbers(
        self,
        rows: Sequence[SelectingRow],
        indices: Sequence[int],
        chosen_from: IntArray,
        *,
        outputs: int,
        num_rows: int,
    ) -> dict[str, IntArray]:
        """The arrays of `of_layer` and `seen`. Rows that choose nothing keep nothing."""
        states = [revised(row) for row in rows]
        slot, newly_sealed = np.zeros((2, outputs), np.int32)
        kept_at, fresh = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.int32)
        newest = [row for row in states if row.age == 0]
        slot[: len(newest)] = [row.slot for row in newest]
        newly_sealed[: len(newest)] = [row.newly_sealed for row in newest]
        for index, row in zip(indices, states, strict=True):
            kept_at[index] = row.slot * self.window + row.place
            fresh[index] = row.age == 0
        first = np.zeros(num_rows, np.int32)
        first[: len(chosen_from)] = chosen_from
        return {
            "slot": slot,
            "newly_sealed": newly_sealed,
            "kept_from": first,
            "kept_at": kept_at,
            "kept_fresh": fresh,
        }

    def of_layer(self, layer: int, arrays: Mapping[str, Tensor]) -> KeptStates:
        """The states that the merge of ``layer`` continues and keeps."""
        out, lse = self.out[layer].flatten(0, 1), self.lse[layer].flatten(0, 1)
        return KeptStates(out, lse, arrays["kept_at"], arrays["kept_from"], arrays["kept_fresh"])

    def seen(self, layer: int, arrays: Mapping[str, Tensor], page_seen: Tensor) -> SeenPages:
        """The seen-sets of ``layer``; ``page_seen`` receives those of the chosen pages."""
        registers, booked = self.registers[layer], self.booked[layer]
        return SeenPages(registers, booked, arrays["slot"], arrays["newly_sealed"], page_seen)


def revised(row: SelectingRow) -> RevisedRow:
    """The state of a row under revision."""
    assert row.state is not None, "a row under revision has a state"
    return row.state


def _grown(tensor: Tensor, dim: int, more: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
