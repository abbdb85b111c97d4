"""A step that fails, computed once more request by request, so that a fault ends the request it
concerns and no other.

Within a step no request reads what another one computes: who wants a document that somebody else
is computing waits until a step has ended with it. And what a step writes, it writes again: tokens
are booked when it is computed."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looseleaf.engine.runner.batch import logit_sequences
from looseleaf.engine.runner.microbatches import join_reads
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.graphs.step_result import StepResult
from looseleaf.tiers import LoadFailed

_log = logging.getLogger(__name__)
Run = Callable[[StepWork, Tensor | None], StepResult]
TakeBack = Callable[[StepWork], None]


@dataclass(frozen=True)
class ComputedStep:
    """What the device computes of a step: ``work``, and its ``result`` as of `Runner.run`.
    ``failed`` are the parts of single requests that it can't compute, each with its fault; what is
    in neither was taken back."""

    work: StepWork
    result: StepResult
    failed: Rows[tuple[StepWork, Exception]] = ()


def isolate_fault(
    run: Run, work: StepWork, previous: Tensor | None, take_back: TakeBack, fault: Exception
) -> ComputedStep:
    """Compute a step that failed with ``fault`` request by request, by `Runner.run`; ``take_back``
    hears what was computed in vain since a document did not come, and is to be scheduled once
    more."""
    nothing = ComputedStep(_joined(work, []), StepResult.of_chunks(torch.empty(0)))
    if isinstance(fault, LoadFailed):
        take_back(work)
        return nothing
    parts = _by_request(work)
    if len(parts) == 1:
        return replace(nothing, failed=[(work, fault)])
    _log.warning("a step of %d requests failed, each is computed alone: %r", len(parts), fault)
    results, failed = list[tuple[StepWork, StepResult]](), list[tuple[StepWork, Exception]]()
    logits = dict[Sequence, Tensor]()
    for part in parts:
        try:
            result = run(part, previous)
        except LoadFailed:
            take_back(part)
        except Exception as error:
            failed.append((part, error))
        else:
            results.append((part, result))
            # the next part may replay the same graph
            logits |= zip(logit_sequences(part), result.logits.clone(), strict=True)
    completed = _joined(work, [part for part, _ in results])
    row_of = {sequence: row for row, sequence in enumerate(completed.decode)}
    reads = [([row_of[s] for s in part.decode], result) for part, result in results]
    rows = [logits[sequence] for sequence in logit_sequences(completed)]
    joined = join_reads(reads, torch.stack(rows) if rows else torch.empty(0))
    return ComputedStep(completed, joined, failed)


def _by_request(work: StepWork) -> list[StepWork]:
    """The part of ``work`` of each of its requests."""
    sequences = [*work.choosing, *work.decode, *(chunk.sequence for chunk in work.chunks)]
    return [
        StepWork(
            [s for s in work.decode if s.request_id == name],
            [chunk for chunk in work.chunks if chunk.sequence.request_id == name],
            [], [], [],
            [s for s in work.choosing if s.request_id == name],
        )
        for name in dict.fromkeys(s.request_id for s in sequences)
    ]  # fmt: skip


def _joined(work: StepWork, parts: Iterable[StepWork]) -> StepWork:
    """``work``, restricted to the sequences and chunks of ``parts``."""
    ids = {id(item) for part in parts for item in (*part.decode, *part.chunks, *part.choosing)}
    return replace(
        work,
        decode=[s for s in work.decode if id(s) in ids],
        chunks=[chunk for chunk in work.chunks if id(chunk) in ids],
        choosing=[s for s in work.choosing if id(s) in ids],
    )
