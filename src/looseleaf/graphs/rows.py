"""The rows of a step on the device: tokens, slots, positions, and the rows whose logits it needs.

The token of a row may be *awaited*: the previous step sampled it on the device as its row ``r``,
and the host has no copy yet. A negative number represents it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

IntArray = npt.NDArray[np.int64]


def awaited_token(row: int) -> int:
    """What stands for the token that the step before samples for its row ``row``."""
    return -1 - row


def arrived_tokens(
    tokens: Int[Tensor, " rows"], previous: Int[Tensor, " sampled"]
) -> Int[Tensor, " rows"]:
    """``tokens`` with those that were awaited taken from ``previous``."""
    # where nothing is awaited, any row of the other will do
    return torch.where(tokens < 0, previous[(-1 - tokens).clamp_min_(0)], tokens)


@dataclass(frozen=True)
class RowInputs:
    """Token, slot (``page * page_size + slot``) and place in its segment of every row of a step.

    ``table`` is int64 ``[3, rows]``; ``wanted`` lists the rows whose logits are wanted, None for
    all. ``past`` are rows that are revised: they go through all layers, and yield no logits."""

    table: IntArray
    wanted: list[int] | None
    past: range = range(0)

    @property
    def num_rows(self) -> int:
        return int(self.table.shape[1])

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and places on ``device``."""
        table = to_device(torch.from_numpy(self.table), device)
        return table[0], table[1], table[2]

    @property
    def asked(self) -> list[int] | None:
        """The rows that the last layer has queries of, None for all: those wanted, and revised
        ones."""
        return None if self.wanted is None else sorted([*self.wanted, *self.past])

    def asked_on(self, device: torch.device) -> Tensor:
        """The rows that are asked for, as an index on ``device``."""
        return to_device(torch.tensor(self.asked, dtype=torch.int64), device)

    def without_past(
        self, hidden: Float[Tensor, "asked hidden_size"]
    ) -> Float[Tensor, "wanted hidden_size"]:
        """Of the rows that are asked for those that are wanted."""
        if not self.past:
            return hidden
        return torch.cat([hidden[: self.past.start], hidden[self.past.stop :]])


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``, without waiting for what the device still has to do."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def join_tables(tables: Seq[IntArray]) -> IntArray:
    """Tables ``[numbers, rows]`` one behind the other, each number of all rows in one piece, as
    kernels read it: NumPy would leave those of blends lying row by row."""
    return np.ascontiguousarray(np.concatenate(tables, axis=1))
