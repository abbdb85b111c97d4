"""Prompt rows that read host-resident segments, and the merge with their other states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.index.host.attend import HostedRead, merge_all, read_chunk
from looseleaf.types import AttnState, Rotation, ScoreRule


@dataclass(frozen=True)
class HostedChunk:
    """The rows of a chunk, as a slice of a step's rows, and their reads outside of the pool."""

    rows: slice
    positions: Tensor
    reads: tuple[HostedRead, ...]

    def join(
        self, layer: int, q: Tensor, state: AttnState, rule: ScoreRule, rotation: Rotation
    ) -> None:
        """Merge the chunk's host-resident reads into the ``state`` of all new rows, in place."""
        rows = self.rows
        read = read_chunk(layer, q[rows], self.positions, self.reads, rule, rotation)
        own = AttnState(state.out[rows], state.lse[rows])
        merged = merge_all([own, read])
        state.out[rows], state.lse[rows] = merged.out.to(state.out.dtype), merged.lse


def hosted_chunks(
    chunks: Sequence[PrefillChunk], device: torch.device | None = None, start: int = 0
) -> list[HostedChunk]:
    """The chunks with host-resident reads; their rows are on ``device``, from row ``start`` on."""
    host_chunks = []
    for chunk in chunks:
        rows = slice(start, start + len(chunk.positions))
        if chunk.hosted:
            host_chunks.append(
                HostedChunk(rows, torch.tensor(list(chunk.positions), device=device), chunk.hosted)
            )
        start = rows.stop
    return host_chunks
