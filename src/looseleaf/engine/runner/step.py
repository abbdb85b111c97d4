"""A step on the host: the rows, chunks and features that the runner passes to the model.

The row table has tokens, slots and offsets. A token may be *awaited*: the previous step sampled it
on the device, and the host has no copy yet. A negative number is its placeholder.
`PassTimer` adds the time of a step with new rows to the model's compute time."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.blend.fusion import Fusion
from looseleaf.engine.prompt_logprobs import ScoredRows
from looseleaf.engine.scheduler import Chunk, StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputeTime, count_read, passes_over
from looseleaf.graphs.layerwise import LateRows, LayerwiseWait
from looseleaf.graphs.rows import RowInputs, join_tables
from looseleaf.kv.store import PendingLoad
from looseleaf.prompt.feature import Feature, FeatureRows
from looseleaf.prompt.placements import DocumentUse


@dataclass(frozen=True)
class Step:
    """The decode rows, chunks and row table of a step.

    ``features`` pairs each feature with the rows of its sequence. ``fusions`` are the blending
    passes whose first row is in this step, and ``late_rows`` their rows that enter at a later
    layer. ``awaited`` are the loads of documents that rows read. ``scored`` are rows of prompts
    whose log-probabilities are requested."""

    work: StepWork
    decode: Rows[DecodeRow]
    chunks: Rows[PrefillChunk]
    rows: RowInputs
    features: Rows[tuple[Feature, FeatureRows]] = ()
    fusions: Rows[Fusion] = ()
    late_rows: Rows[LateRows] = ()
    awaited: Rows[PendingLoad] = ()
    scored: Rows[ScoredRows] = ()

    @property
    def replays(self) -> bool:
        """Whether the step may replay as CUDA graphs."""
        return not self.scored and all(feature.replays for feature, _ in self.features)

    @property
    def sees_queries(self) -> bool:
        """Whether the last layer makes queries of all rows, for a feature or for scores."""
        return bool(self.scored) or any(feature.sees_queries for feature, _ in self.features)


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
    fusions = [chunk.fusion for chunk in work.chunks if chunk.fusion and chunk.start == 0]
    late_rows = list(_late_rows(work.chunks, len(decode)))
    scored = list(_scored_rows(work.chunks, chunks, len(decode)))
    return Step(work, decode, chunks, rows, features, fusions, late_rows, awaited, scored)


def _scored_rows(
    chunks: Rows[Chunk], reads: Rows[PrefillChunk], first_row: int
) -> Iterator[ScoredRows]:
    """The scored rows of ``chunks``, whose first row is ``first_row`` of the step."""
    for chunk, read in zip(chunks, reads, strict=True):
        scorer = chunk.sequence.prompt_logprobs
        is_text = not isinstance(chunk.target, DocumentUse)
        if is_text and scorer is not None and not scorer.complete:
            rows, indices = scorer.rows(read.positions)
            if len(rows):
                yield ScoredRows(scorer, first_row + rows, indices)
        first_row += chunk.num_rows


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
        row += chunk.num_rows
        if chunk.ends_prompt:
            yield row - 1


def _late_rows(chunks: Iterable[Chunk], first_row: int) -> Iterator[LateRows]:
    """The late rows of ``chunks``, whose first row is ``first_row`` of the step."""
    for chunk in chunks:
        fusion = chunk.fusion
        late = fusion.late_rows(chunk.start, chunk.stop, first_row) if fusion else None
        if late is not None:
            yield late
        first_row += chunk.num_rows


# least share of rows that blending passes need for their time to be known
_MOSTLY = 0.9


class PassTimer:
    """Times one step, from construction to `end`, for ``compute_time``."""

    def __init__(self, compute_time: ComputeTime, device: torch.device) -> None:
        self._compute_time = compute_time
        self._begun = compute_time.begin(device)

    def end(self, step: Step, layerwise: LayerwiseWait | None) -> None:
        """Observe the launched step, without the time that its layers waited for documents."""
        blended = [chunk.num_rows for chunk in step.work.chunks if chunk.fusion]
        # the time of a blending pass is unknown when other rows share its step
        if blended and sum(blended) <= _MOSTLY * step.rows.num_rows:
            return
        if layerwise is not None and isinstance(self._begun, float):
            self._begun += layerwise.waited
        waits = () if layerwise is None else layerwise.waits
        blends = passes_over(step.chunks)
        self._compute_time.end(
            self._begun, step.rows.num_rows, _pairs(step), blends=blends, waits=waits
        )

    def end_replay(self, step: Step) -> None:
        """Observe a step that was launched as a graph."""
        blends = passes_over(step.chunks)
        self._compute_time.end(self._begun, step.rows.num_rows, _pairs(step), blends=blends)


def _pairs(step: Step) -> int:
    own = sum(row.position + 1 for row in step.decode)
    return own + sum(map(count_read, step.chunks))
