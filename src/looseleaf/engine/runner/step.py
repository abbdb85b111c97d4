"""A step as the runner prepares it, and its result: logits, and how its decode rows read."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.blend.fusion import Fusion
from looseleaf.engine.runner.batch import step_rows
from looseleaf.engine.runner.resume_at_layer import find_entering
from looseleaf.engine.scheduler import StepWork
from looseleaf.graphs.late_rows import Entering
from looseleaf.graphs.rows import RowInputs
from looseleaf.kv.store import PendingLoad
from looseleaf.prompt.feature import Feature, FeatureRows


@dataclass(frozen=True)
class Step:
    """A step on the host: its decode rows, its chunks and the numbers of all rows.

    ``features`` are the rows of sequences that use features. ``fusions`` are the passes that blend
    from their first row on, ``entering`` their rows that enter late, and ``awaited`` the documents
    that rows read and that are still arriving."""

    work: StepWork
    decode: Rows[DecodeRow]
    chunks: Rows[PrefillChunk]
    rows: RowInputs
    features: Rows[tuple[Feature, FeatureRows]] = ()
    fusions: Rows[Fusion] = ()
    entering: Rows[Entering] = ()
    awaited: Rows[PendingLoad] = ()

    @property
    def replays(self) -> bool:
        """Whether the step may replay as CUDA graphs."""
        return not self.features or all(feature.replays for feature, _ in self.features)

    @property
    def sees_queries(self) -> bool:
        """Whether the last layer makes queries of all rows."""
        return any(feature.sees_queries for feature, _ in self.features)


def prepare_step(work: StepWork, each: Rows[Rows[DecodeRow]], page_size: int) -> Step:
    """The step of ``work``; ``each`` has the rows of every output that decodes, newest first."""
    past = [row for rows in each for row in rows[1:]]
    decode = [rows[0] for rows in each] + past
    num_past = [len(rows) - 1 for rows in each] if past else ()
    rows = step_rows(work, page_size, num_past)
    chunks = [chunk.prefill() for chunk in work.chunks] if work.chunks else []
    features = list(_features(work, decode, chunks))
    if not chunks:
        return Step(work, decode, chunks, rows, features)
    awaited = [arriving for chunk in work.chunks for arriving in chunk.awaits()]
    targets = [(c.target, c.start) for c in work.chunks]
    fusions = [target for target, start in targets if isinstance(target, Fusion) and start == 0]
    entering = list[Entering]()
    if any(isinstance(target, Fusion) for target, _ in targets):
        entering = find_entering(work.chunks, len(decode))
    return Step(work, decode, chunks, rows, features, fusions, entering, awaited)


def _features(
    work: StepWork, decode: Rows[DecodeRow], chunks: Rows[PrefillChunk]
) -> Iterator[tuple[Feature, FeatureRows]]:
    """The features of the sequences of a step, with the newest row or the chunk of each."""
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
