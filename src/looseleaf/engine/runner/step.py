"""A step on the host: the rows, chunks and features that the runner passes to the model.

The row table has tokens, slots and offsets. A token may be *awaited*: the previous step sampled it
on the device, and the host has no copy yet. A negative number is its placeholder."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.blend.fusion import Fusion
from looseleaf.engine.runner.resume_at_layer import find_late_rows
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.graphs.late_rows import LateRows
from looseleaf.graphs.rows import RowInputs, join_tables
from looseleaf.kv.store import PendingLoad
from looseleaf.prompt.feature import Feature, FeatureRows


@dataclass(frozen=True)
class Step:
    """The decode rows, chunks and row table of a step.

    ``features`` pairs each feature with the rows of its sequence. ``fusions`` are the blending
    passes whose first row is in this step, and ``late_rows`` their rows that enter at a later
    layer. ``awaited`` are the loads of documents that rows read."""

    work: StepWork
    decode: Rows[DecodeRow]
    chunks: Rows[PrefillChunk]
    rows: RowInputs
    features: Rows[tuple[Feature, FeatureRows]] = ()
    fusions: Rows[Fusion] = ()
    late_rows: Rows[LateRows] = ()
    awaited: Rows[PendingLoad] = ()

    @property
    def replays(self) -> bool:
        """Whether the step may replay as CUDA graphs."""
        return not self.features or all(feature.replays for feature, _ in self.features)

    @property
    def sees_queries(self) -> bool:
        """Whether a feature needs the last layer's queries of all rows."""
        return any(feature.sees_queries for feature, _ in self.features)


def prepare_step(work: StepWork, outputs: Rows[Rows[DecodeRow]], page_size: int) -> Step:
    """The step of ``work``; ``outputs`` has the rows of every decoding output, newest first."""
    past = [row for rows in outputs for row in rows[1:]]
    decode = [rows[0] for rows in outputs] + past
    num_past = [len(rows) - 1 for rows in outputs] if past else ()
    rows = step_rows(work, page_size, num_past)
    chunks = [chunk.prefill() for chunk in work.chunks] if work.chunks else []
    features = list(_features(work, decode, chunks))
    if not chunks:
        return Step(work, decode, chunks, rows, features)
    awaited = [arriving for chunk in work.chunks for arriving in chunk.awaits()]
    targets = [(c.target, c.start) for c in work.chunks]
    fusions = [target for target, start in targets if isinstance(target, Fusion) and start == 0]
    late_rows = list[LateRows]()
    if any(isinstance(target, Fusion) for target, _ in targets):
        late_rows = find_late_rows(work.chunks, len(decode))
    return Step(work, decode, chunks, rows, features, fusions, late_rows, awaited)


def _features(
    work: StepWork, decode: Rows[DecodeRow], chunks: Rows[PrefillChunk]
) -> Iterator[tuple[Feature, FeatureRows]]:
    """The features of each sequence, with its newest row or its chunk."""
    for row, sequence in enumerate(work.decode):
        for feature in sequence.features:
            yield feature, FeatureRows(sequence, range(row, row + 1), decode[row])
    stop = len(decode)
    for chunk, read in zip(work.chunks, chunks, strict=True):
        start, stop, sequence = stop, stop + len(read.positions), chunk.sequence
        for feature in sequence.features:
            in_tail = chunk.target is sequence.tail
            rows = FeatureRows(
                sequence,
                range(start, stop),
                read,
                in_tail=in_tail,
                ends_prompt=chunk.ends_prompt,
            )
            yield feature, rows


def step_rows(work: StepWork, page_size: int, num_past: Rows[int]) -> RowInputs:
    """The rows of ``work``: one for each decoding sequence, then ``num_past`` revised rows of each,
    then the rows of the chunks."""
    decode = [_tail_row(sequence, 0, page_size) for sequence in work.decode]
    if num_past:
        decode += [
            _tail_row(sequence, age, page_size)
            for sequence, past in zip(work.decode, num_past, strict=True)
            for age in range(1, past + 1)
        ]
    table = np.array(decode, dtype=np.int64).reshape(-1, 3).T
    if not work.chunks and not num_past:
        return RowInputs(np.ascontiguousarray(table), None)
    tables = [table, *(chunk.table(page_size) for chunk in work.chunks)]
    past = range(len(work.decode), len(decode))
    return RowInputs(join_tables(tables), list(_logit_rows(work, len(decode))), past)


def _tail_row(sequence: Sequence, age: int, page_size: int) -> tuple[int, int, int]:
    """Token, slot and offset of the token ``age`` tokens before the newest."""
    tail = sequence.tail
    offset = len(tail.tokens) - 1 - age
    stored = offset - sequence.num_evicted
    slot = tail.pages[stored // page_size] * page_size + stored % page_size
    return tail.tokens[offset], slot, offset


def _logit_rows(work: StepWork, row: int) -> Iterator[int]:
    """The logit rows of the step; ``row`` is the first row of the chunks."""
    yield from range(len(work.decode))
    for chunk in work.chunks:
        row += chunk.stop - chunk.start
        if chunk.ends_prompt:
            yield row - 1
