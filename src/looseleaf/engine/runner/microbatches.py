"""A step that is computed in parts, each of which replays.

A pass that blends has graphs of its own, which hold no rows that decode, and the graphs of steps
hold no pass that blends. The work list of a graph has one choice, so rows that choose by several
policies are computed in turn. What is launched kernel by kernel takes the host longer than the
device: with a pass of 416 rows and one that decodes 50 ms, where both replay in 22 (one H200)."""

from collections.abc import Sequence as Rows
from dataclasses import replace

from torch import Tensor

from looseleaf.attention.plan.groups import DecodeRow, Groups
from looseleaf.attention.select.attend_pages import SelectedRows
from looseleaf.attention.select.candidates import PagePolicy, SelectingRow
from looseleaf.attention.select.worklist_scores import Listed
from looseleaf.blend.fusion import Fusion
from looseleaf.engine.scheduler import Chunk, StepWork
from looseleaf.graphs import prefill as pass_graphs
from looseleaf.graphs.decode import MAX_ROWS
from looseleaf.graphs.step_result import StepResult


def parted(work: StepWork) -> tuple[StepWork, StepWork] | None:
    """The rest of ``work``, and the passes in it that blend; None if nothing decodes in it or
    nothing blends, or if one of the two has too many rows to replay.

    The rest comes first: passes may read documents that it computes."""
    passes = [chunk for chunk in work.chunks if isinstance(chunk.target, Fusion)]
    others = [chunk for chunk in work.chunks if not isinstance(chunk.target, Fusion)]
    if not passes or not work.decode:
        return None
    if len(work.decode) + _num_rows(others) > MAX_ROWS or _num_rows(passes) > pass_graphs.MAX_ROWS:
        return None
    if any(chunk.awaits() for chunk in passes):
        return None
    nothing = replace(work, admitted=[], preempted=[], refused=[], choosing=[])
    return replace(nothing, chunks=others), replace(nothing, decode=[], chunks=passes)


def logit_places(work: StepWork) -> list[int]:
    """Where the logits of ``work`` stand among those of its parts, one behind the other."""
    ending = [chunk for chunk in work.chunks if chunk.ends_prompt]
    in_pass = [isinstance(chunk.target, Fusion) for chunk in ending]
    num_decode, num_rest = len(work.decode), len(work.decode) + in_pass.count(False)
    places, rest, blended = list(range(num_decode)), num_decode, num_rest
    for is_pass in in_pass:
        places.append(blended if is_pass else rest)
        rest, blended = rest + (not is_pass), blended + is_pass
    return places


def turns_of(rows: Rows[Rows[DecodeRow]]) -> list[list[int]]:
    """Which outputs of a step are computed together, by their places, where its decode ``rows`` are
    those of each output, the newest first: one list unless they choose by several policies that all
    replay. Who chooses nothing is in the first."""
    by_policy: dict[PagePolicy | None, list[int]] = {None: []}
    for place, (newest, *_) in enumerate(rows):
        policy = newest.policy if isinstance(newest, SelectingRow) else None
        by_policy.setdefault(policy, []).append(place)
    dense, *turns = by_policy.values()
    newest_rows = [some[0] for some in rows]
    if len(turns) < 2 or not all(map(_replays, newest_rows)):
        return [list(range(len(rows)))]
    return [sorted(dense + turns[0]), *turns[1:]]


def _replays(row: DecodeRow) -> bool:
    """Whether a work list on the device can tell what the row reads."""
    if not isinstance(row, SelectingRow):
        return True
    policy = row.policy
    listed = isinstance(policy, Listed) and policy.listed_budget is not None
    return listed and not row.measured


def turn_of(work: StepWork, turn: Rows[int], first: bool) -> StepWork:
    """The part of ``work`` in which the outputs at the places ``turn`` decode; its chunks are in
    the ``first``."""
    decode = [work.decode[place] for place in turn]
    chunks = work.chunks if first else []
    return replace(
        work, decode=decode, chunks=chunks, admitted=[], preempted=[], refused=[], choosing=[]
    )


def places_in_turns(turns: Rows[Rows[int]], num_chunks: int) -> list[int]:
    """Where the logits of a step stand among those of its turns, one behind the other, if
    ``num_chunks`` of its chunks yield some."""
    num_decode = sum(map(len, turns))
    chunks = range(num_decode, num_decode + num_chunks)
    order = [*turns[0], *chunks, *(place for turn in turns[1:] for place in turn)]
    return sorted(range(len(order)), key=order.__getitem__)


def join_reads(
    results: Rows[tuple[Rows[int], StepResult]], logits: Tensor, launched: float | None = None
) -> StepResult:
    """The result of a step with these ``logits``, of the outputs that decode in each of its parts,
    by their places in the step, and the part's result."""
    num_outputs = sum(len(places) for places, _ in results)
    joined, selected = Groups([], [0] * num_outputs), list[SelectedRows]()
    for places, result in results:
        groups, place_of = result.groups, dict(enumerate(places))
        for item in groups.items:
            entries = [e._replace(row=place_of[e.row]) for e in item.entries if e.row in place_of]
            joined.items.append(replace(item, entries=entries))
        for row, place in place_of.items():
            joined.tail_starts[place] = groups.tail_starts[row]
        for some in result.selected:
            # rows behind the newest are revised ones, which count for nobody
            rows = [place_of.get(row, num_outputs + row) for row in some.indices]
            selected.append(replace(some, indices=rows))
    begun = [launched, *(result.launched for _, result in results)]
    return StepResult(logits, joined, selected, next((at for at in begun if at), None))


def _num_rows(chunks: Rows[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)
