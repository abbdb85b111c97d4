"""The rows of a step on the device: tokens, slots, positions, and the rows whose logits it needs.

The token of a row may be *awaited*: the previous step sampled it on the device as its row ``r``,
and the host has no copy yet. A negative number represents it.

Graphs read the row table at fixed addresses. The host writes it for every pass, and the pass copies
it to the device."""

from collections.abc import Iterable, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.attention.buffers.pinned_buffer import PinnedBuffer

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

    ``table`` is int64 ``[3, rows]``; ``logit_rows`` are rows with logits, None for all. ``past``
    are revised rows, which pass all layers and have no logits."""

    table: IntArray
    logit_rows: list[int] | None
    past: range = range(0)

    @property
    def num_rows(self) -> int:
        return int(self.table.shape[1])

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, slots and offsets on ``device``."""
        table = to_device(torch.from_numpy(self.table), device)
        return table[0], table[1], table[2]

    @property
    def last_rows(self) -> list[int] | None:
        """Rows with queries in the last layer: logit rows and revised rows; None for all."""
        return None if self.logit_rows is None else sorted([*self.logit_rows, *self.past])

    def last_rows_on(self, device: torch.device) -> Tensor:
        """`last_rows` as an index on ``device``."""
        return to_device(torch.tensor(self.last_rows, dtype=torch.int64), device)

    def without_past(
        self, hidden: Float[Tensor, "last_rows hidden_size"]
    ) -> Float[Tensor, "logit_rows hidden_size"]:
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


# token, slot, offset and first slot of a padding row
_PADDING = np.array([[0], [-1], [0], [-1]])


class RowBuffer:
    """Five numbers of up to ``capacity`` rows: token, slot, offset in the segment, slot before late
    rows enter, and logit rows. The slot of padding rows and of rows that have not entered is -1.

    ``numbers`` is one tensor. The host buffer is single, so a writer waits until the previous
    `fetch` has ended."""

    numbers: Int[Tensor, "5 capacity"]

    def __init__(self, capacity: int, device: torch.device) -> None:
        # 64 bits each
        size = 2 * 5 * capacity
        self._buffer = PinnedBuffer({"rows": size}, device)
        self.numbers = self._buffer.tensors["rows"].view(torch.int64).view(5, capacity)
        self._host = self._buffer.numbers[:size].view(np.int64).reshape(5, capacity)

    def load(
        self, table: IntArray, logit_rows: Sequence[int], late_rows: Iterable[IntArray] = ()
    ) -> None:
        """Write ``table`` of a `RowInputs`, its logit rows, and its late rows."""
        host, num_rows = self._host, table.shape[1]
        host[:3, :num_rows] = table
        host[3, :num_rows] = table[1]
        for rows in late_rows:
            host[3, rows] = -1
        host[:4, num_rows:] = _PADDING
        host[4] = 0
        host[4, : len(logit_rows)] = logit_rows

    def clear(self) -> None:
        self._host[:4] = _PADDING
        self._host[4] = 0

    def fetch(self) -> None:
        """Copy the written numbers to the device, in stream order."""
        self._buffer.fetch()
