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
    """The placeholder of the token that the previous step samples for its row ``row``."""
    return -1 - row


def arrived_tokens(
    tokens: Int[Tensor, " rows"], previous: Int[Tensor, " sampled"]
) -> Int[Tensor, " rows"]:
    """``tokens`` with placeholders replaced by the sampled tokens in ``previous``."""
    # the index of a row without a placeholder is arbitrary
    return torch.where(tokens < 0, previous[(-1 - tokens).clamp_min_(0)], tokens)


@dataclass(frozen=True)
class RowInputs:
    """Token, slot (``page * page_size + offset``) and offset in its segment of every row of a step.

    ``table`` is int64 ``[3, rows]``; ``wanted`` lists the logit rows, None for all. ``past`` are
    revised rows, which pass all layers and have no logits."""

    table: IntArray
    wanted: list[int] | None
    past: range = range(0)

    @property
    def num_rows(self) -> int:
        return int(self.table.shape[1])

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and offsets on ``device``."""
        table = to_device(torch.from_numpy(self.table), device)
        return table[0], table[1], table[2]

    @property
    def asked(self) -> list[int] | None:
        """Rows with queries in the last layer: logit rows and revised rows; None for all."""
        return None if self.wanted is None else sorted([*self.wanted, *self.past])

    def asked_on(self, device: torch.device) -> Tensor:
        """`asked` as an index on ``device``."""
        return to_device(torch.tensor(self.asked, dtype=torch.int64), device)

    def without_past(
        self, hidden: Float[Tensor, "asked hidden_size"]
    ) -> Float[Tensor, "wanted hidden_size"]:
        """The hidden states of the logit rows, without the revised rows."""
        if not self.past:
            return hidden
        return torch.cat([hidden[: self.past.start], hidden[self.past.stop :]])


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device``, without a wait for work in flight."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def join_tables(tables: Seq[IntArray]) -> IntArray:
    """Concatenated tables ``[numbers, rows]``, C-contiguous because kernels read each number of all
    rows as one block."""
    return np.ascontiguousarray(np.concatenate(tables, axis=1))
