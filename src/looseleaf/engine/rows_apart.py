"""Which rows of a step read their documents apart from text (APE, arXiv 2502.05431): those that
decode, and those of chunks that end in the sequence's own text."""

from collections.abc import Iterator, Sequence

from looseleaf.attention.apart import Apart
from looseleaf.attention.chunks import PrefillChunk
from looseleaf.attention.groups import DecodeRow
from looseleaf.engine.scheduler import StepWork


def rows_apart(
    work: StepWork, decode: Sequence[DecodeRow], chunks: Sequence[PrefillChunk]
) -> Iterator[Apart]:
    """The rows of a step that read their documents apart from text."""
    found = []
    for start, (sequence, row) in enumerate(zip(work.decode, decode, strict=False)):
        if sequence.apart:
            own = PrefillChunk([row.position], (*row.settled, row.tail))
            found.append((start, sequence, own))
    stop = len(decode)
    for chunk, own in zip(work.chunks, chunks, strict=True):
        start, stop = stop, stop + len(own.positions)
        if chunk.sequence.apart and chunk.target is chunk.sequence.tail:
            found.append((start, chunk.sequence, own))
    for start, sequence, own in found:
        fuse, rows = sequence.apart, range(start, start + len(own.positions))
        assert fuse is not None
        yield Apart(rows, own, sequence.spans_apart(), fuse.temperature, fuse.scale)
