"""A step that is computed as two, each of which replays.

A pass that blends has graphs of its own, which hold no rows that decode, and the graphs of steps
hold no pass that blends. What is launched kernel by kernel takes the host longer than the device:
with a pass of 416 rows and one that decodes 50 ms, where both replay in 22 (one H200)."""

from collections.abc import Sequence as Rows
from dataclasses import replace

from looseleaf.engine import pass_graphs
from looseleaf.engine.fusion import Fusion
from looseleaf.engine.graphs import MAX_ROWS
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Chunk


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


def _num_rows(chunks: Rows[Chunk]) -> int:
    return sum(chunk.stop - chunk.start for chunk in chunks)
