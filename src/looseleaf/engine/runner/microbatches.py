"""Microbatches: a step in parts, each of which replays as a graph.

Blending passes and decode steps have separate graphs, so a step with both runs in two parts. The
work list of a graph has one policy, so rows of several policies run in one microbatch each. Replay
is worth the split, because separate kernel launches take the host longer than the device."""

from collections.abc import Sequence as Rows
from dataclasses import replace

from torch import Tensor

from looseleaf.attention.plan.groups import DecodeRow, Groups
from looseleaf.attention.select.attend_pages import SelectedRows
from looseleaf.attention.select.policy import PagePolicy, policy_of
from looseleaf.engine.scheduler import Chunk, StepWork
from looseleaf.graphs import prefill as pass_graphs
from looseleaf.graphs.decode import MAX_ROWS
from looseleaf.graphs.step_result import StepResult


def parted(work: StepWork) -> tuple[StepWork, StepWork] | None:
    """``work`` without its blending passes, then these passes.

    Returns None if either part has no rows or too many rows to replay. The passes run second,
    because they may read documents that the first part computes."""
    passes = [chunk for chunk in work.chunks if chunk.fusion]
    plain = [chunk for chunk in work.chunks if not chunk.fusion]
    if not passes or not work.decode:
        return None
    if len(work.decode) + _num_rows(plain) > MAX_ROWS or _num_rows(passes) > pass_graphs.MAX_ROWS:
        return None
    if any(chunk.awaits() for chunk in passes):
        return None
    nothing = replace(work, admitted=[], preempted=[], refused=[], choosing=[])
    return replace(nothing, chunks=plain), replace(nothing, decode=[], chunks=passes)


def logit_rows(work: StepWork) -> list[int]:
    """The row of each logit of ``work`` in the concatenated logits of its two parts."""
    ending = [chunk for chunk in work.chunks if chunk.ends_prompt]
    in_pass = [chunk.fusion is not None for chunk in ending]
    num_decode, num_rest = len(work.decode), len(work.decode) + in_pass.count(False)
    rows, rest, blended = list(range(num_decode)), num_decode, num_rest
    for is_pass in in_pass:
        rows.append(blended if is_pass else rest)
        rest, blended = rest + (not is_pass), blended + is_pass
    return rows


def microbatches_of(outputs: Rows[Rows[DecodeRow]]) -> list[list[int]]:
    """The outputs of each microbatch of a step; ``outputs`` has the rows of each, newest first.

    There is one microbatch unless the rows have several policies that all replay. Outputs without a
    policy are in the first."""
    by_policy: dict[PagePolicy | None, list[int]] = {None: []}
    for index, (newest, *_) in enumerate(outputs):
        by_policy.setdefault(policy_of(newest), []).append(index)
    dense, *microbatches = by_policy.values()
    if len(microbatches) < 2 or not all(newest.replays for newest, *_ in outputs):
        return [list(range(len(outputs)))]
    return [sorted(dense + microbatches[0]), *microbatches[1:]]


def microbatch_of(work: StepWork, outputs: Rows[int], first: bool) -> StepWork:
    """The part of ``work`` that decodes ``outputs``; the ``first`` microbatch has all chunks."""
    decode = [work.decode[index] for index in outputs]
    chunks = work.chunks if first else []
    return replace(
        work, decode=decode, chunks=chunks, admitted=[], preempted=[], refused=[], choosing=[]
    )


def rows_in_microbatches(microbatches: Rows[Rows[int]], num_chunks: int) -> list[int]:
    """The row of each logit of a step in the concatenated logits of its microbatches.

    ``num_chunks`` chunks of the step end a prompt and so have logits."""
    num_decode = sum(map(len, microbatches))
    chunks = range(num_decode, num_decode + num_chunks)
    order = [*microbatches[0], *chunks, *(index for rows in microbatches[1:] for index in rows)]
    return sorted(range(len(order)), key=order.__getitem__)


def join_reads(
    results: Rows[tuple[Rows[int], StepResult]], logits: Tensor, launched: float | None = None
) -> StepResult:
    """The result of a step with these ``logits``.

    ``results`` pairs the outputs of each microbatch, as rows of the step, with its result."""
    num_outputs = sum(len(outputs) for outputs, _ in results)
    joined, selected = Groups([], [0] * num_outputs), list[SelectedRows]()
    for outputs, result in results:
        groups, row_of = result.groups, dict(enumerate(outputs))
        for item in groups.items:
            entries = [e._replace(row=row_of[e.row]) for e in item.entries if e.row in row_of]
            joined.items.append(replace(item, entries=entries))
        for row, step_row in row_of.items():
            joined.tail_starts[step_row] = groups.tail_starts[row]
        for selection in result.selected:
            # rows after the newest ones are revised rows, which are not counted
            rows = [row_of.get(row, num_outputs + row) for row in selection.indices]
            selected.append(replace(selection, indices=rows))
    begun = [launched, *(result.launched for _, result in results)]
    return StepResult(logits, joined, selected, next((at for at in begun if at), None))


def _num_rows(chunks: Rows[Chunk]) -> int:
    return sum(chunk.num_rows for chunk in chunks)
