"""Fault isolation: a failed step runs again request by request, so that only faulty requests end.

This is safe because no request of a step reads keys that another request of the step computes.
Repeated writes are the same, and tokens are counted only after the step."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looseleaf.engine.runner.microbatches import join_reads
from looseleaf.engine.runner.step_sampler import logit_sequences
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.graphs.step_result import StepResult
from looseleaf.tiers import LoadFailed

_log = logging.getLogger(__name__)
Run = Callable[[StepWork, Tensor | None], StepResult]
TakeBack = Callable[[StepWork], None]


@dataclass(frozen=True)
class ComputedStep:
    """The computed part of a step, ``work``, with its ``result`` of `Runner.run`.

    ``failed`` are the parts of single requests with their faults. Other parts are scheduled
    again."""

    work: StepWork
    result: StepResult
    failed: Rows[tuple[StepWork, Exception]] = ()


def isolate_fault(
    run: Run, work: StepWork, previous: Tensor | None, take_back: TakeBack, fault: Exception
) -> ComputedStep:
    """Compute a step that failed with ``fault`` again, request by request.

    ``take_back`` is called with each part whose document failed to load, to schedule it again."""
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
