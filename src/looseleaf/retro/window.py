"""The window of one output: the rows that a step computes, and the pages that are final for them.

Rows in the window rewrite their keys at every step, so a page is *sealed* only when its last token
has left the window. Until then every row rereads it at every step, and no cached state covers it:
so cached states contain no stale key. In the step that seals a page all rows read it once more, and
cache the result.

An adaptive window uses that past rows are free while linear layers wait for memory. A linear layer
reads a weight once for all rows, and computes 2 operations a row and weight. In theory more rows
cost no time while ``rows * 2 / bytes_per_weight`` is below the device's operations per byte. So
each of B outputs can have ``free_rows // B`` rows. A GPU's measured limit is lower than the
theoretical one. A CPU computes little per byte, so its windows cost time immediately."""

from dataclasses import dataclass

import torch


@dataclass
class Window:
    """Rows of one output: the newest at ``position``, and ``num_past`` rows before it.

    The window begins at the first decoded token, since prompts are never revised. It grows by a row
    a step, up to the step's limit. A row that leaves is final. A repeated step has the same window.
    ``sealed`` counts the tail's sealed pages, ``newly_sealed`` the pages that past rows must still
    take over.
    """

    position: int = -1
    num_past: int = -1
    sealed: int = 0
    newly_sealed: int = 0

    def advance(self, position: int, width: int, start: int, page_size: int) -> None:
        """Begin a step whose newest row is at ``position``, with at most ``width`` rows; the tail
        begins at position ``start``.
        """
        assert width >= 1, "a step has at least its newest row"
        if position == self.position:
            return
        follows = position == self.position + 1
        kept = self.num_past + 1 if follows else 0
        self.position, self.num_past = position, min(width - 1, kept)
        sealed = max(0, self.first - start) // page_size
        # without past rows there is nothing to take over
        self.newly_sealed = sealed - self.sealed if self.num_past else 0
        self.sealed = sealed

    def restart(self) -> None:
        """Drop all past rows: the next step has its newest row only."""
        self.position = self.num_past = -1

    @property
    def num_rows(self) -> int:
        return self.num_past + 1

    @property
    def first(self) -> int:
        """The position of the oldest row: keys before it are final."""
        return self.position - self.num_past


# matrix operations per byte read: for a GPU as far as measurements show no cost (theory: 176), for
# a CPU with AVX-512 from peak rates (200 GFLOP/s, 20 GB/s)
_GPU_INTENSITY = 64.0
_CPU_INTENSITY = 10.0


def free_rows(device: torch.device, bytes_per_weight: int) -> int:
    """Rows of a step that the linear layers compute while they wait for their weights."""
    intensity = _GPU_INTENSITY if device.type == "cuda" else _CPU_INTENSITY
    return max(1, int(intensity * bytes_per_weight / 2))


def window_for(window: int, num_outputs: int, free: int) -> int:
    """The window of each of ``num_outputs`` outputs in a batch: ``window`` or fewer rows, at least
    1.
    """
    return max(1, min(window, free // max(1, num_outputs)))
