"""How long a few launches take on a GPU: a graph of them, replayed behind a rest.

A card that is busy for long is at its power limit, and what it takes then depends on what it did
before: without a rest one and the same arm differed by 3 % from round to round, with 12 ms of it
by less than 1 (docs/log.md). So every figure is of a few milliseconds behind such a rest, of which
the first are not counted: clocks rise in them. Whoever quotes one should say so.
"""

import time
from collections.abc import Callable

import torch

_REST_SECONDS = 0.012
# what is counted of a burst, in seconds, and how many replays that are at most
_COUNTED, _MOST_REPLAYS = 2e-3, 64


def seconds_of(arm: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What runs ``arm`` once more and says how long it took: rested replays of a graph of it on a
    GPU, once by the clock elsewhere."""
    if device.type != "cuda":

        def timed() -> float:
            start = time.perf_counter()
            arm()
            return time.perf_counter() - start

        return timed
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arm()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    _replays(graph, 1)
    count = max(1, min(_MOST_REPLAYS, round(_COUNTED / _replays(graph, 1))))
    # a replay reads what the arm was made of, which must live as long
    captured = graph, arm

    def replayed() -> float:
        time.sleep(_REST_SECONDS)
        return _replays(captured[0], count)

    return replayed


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of a replay, in the mean of ``count`` behind half as many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(-(-count // 2)):
        graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
