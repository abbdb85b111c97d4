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

from looseleaf.attention.groups import Groups
from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.readings import SelectedRows
from looseleaf.engine.rows import logit_sequences
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.step_parts import joined_reads
from looseleaf.tiers import LoadFailed

_log = logging.getLogger(__name__)
Run = Callable[[StepWork, Tensor | None], Tensor]
TakeBack = Callable[[StepWork], None]
_Reads = tuple[Rows[Sequence], Groups, Rows[SelectedRows]]


@dataclass(frozen=True)
class ComputedStep:
    """What the device computes of a step: ``work``, and its ``logits`` as of `Runner.run`.
    ``failed`` are the parts of single requests that it can't compute, each with its fault; what is
    in neither was taken back."""

    work: StepWork
    logits: Tensor
    failed: Rows[tuple[StepWork, Exception]] = ()


def compute_step(
    run: Run,
    attention: PagedAttention,
    work: StepWork,
    previous: Tensor | None,
    take_back: TakeBack,
) -> ComputedStep:
    """Compute a step by `Runner.run`, at once or, where that fails, request by request;
    ``take_back`` hears what was computed in vain since a document did not come, and is to be
    scheduled once more."""
    if work.empty:
        return ComputedStep(work, torch.empty(0))
    try:
        return ComputedStep(work, run(work, previous))
    except LoadFailed:
        take_back(work)
        return ComputedStep(_joined(work, []), torch.empty(0))
    except Exception as error:
        parts = _by_request(work)
        if len(parts) == 1:
            return ComputedStep(_joined(work, []), torch.empty(0), [(work, error)])
        _log.warning("a step of %d requests failed, each is computed alone: %r", len(parts), error)
    done, failed = list[StepWork](), list[tuple[StepWork, Exception]]()
    logits, reads = dict[Sequence, Tensor](), list[_Reads]()
    for part in parts:
        try:
            found = run(part, previous)
        except LoadFailed:
            take_back(part)
        except Exception as error:
            failed.append((part, error))
        else:
            done.append(part)
            # the next one may replay the same graph
            logits |= zip(logit_sequences(part), found.clone(), strict=True)
            if part.decode:
                reads.append((part.decode, attention.groups, attention.selected))
    left = _joined(work, done)
    place = {sequence: n for n, sequence in enumerate(left.decode)}
    if reads:
        placed = [([place[s] for s in decode], groups, some) for decode, groups, some in reads]
        attention.groups, attention.selected = joined_reads(placed)
    rows = [logits[sequence] for sequence in logit_sequences(left)]
    return ComputedStep(left, torch.stack(rows) if rows else torch.empty(0), failed)


def _by_request(work: StepWork) -> list[StepWork]:
    """What ``work`` computes for each of its requests."""
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
    """``work`` with what is in one of its ``parts`` only."""
    there = {id(one) for p in parts for one in (*p.decode, *p.chunks, *p.choosing)}
    return replace(
        work,
        decode=[s for s in work.decode if id(s) in there],
        chunks=[chunk for chunk in work.chunks if id(chunk) in there],
        choosing=[s for s in work.choosing if id(s) in there],
    )
