"""A step as the runner prepares it, and its result: logits, and how its decode rows read."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from looseleaf.attention.chunks import PrefillChunk
from looseleaf.attention.groups import DecodeRow, Groups
from looseleaf.attention.selected import SelectedRows
from looseleaf.engine.entering import Entering, find_entering
from looseleaf.engine.fusion import Fusion
from looseleaf.engine.rows import RowInputs, step_rows
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Feature, FeatureRows
from looseleaf.kv.store import Arriving


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    ``logits`` ``[rows, vocab_size]`` are of its decode rows, then of chunks that end a prompt.
    ``groups`` are those of the decode rows in the first layer, the same object while the same rows
    go on; ``selected`` are the rows that choose what they read, by policy. ``launched`` is when the
    device first got something to do, on the clock `time.perf_counter`."""

    logits: Tensor
    groups: Groups
    selected: Rows[SelectedRows] = ()
    launched: float | None = None

    @classmethod
    def of_chunks(cls, logits: Tensor, launched: float | None = None) -> "StepResult":
        """The result of a step without decode rows."""
        return cls(logits, Groups([], []), (), launched)


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
    awaited: Rows[Arriving] = ()

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
