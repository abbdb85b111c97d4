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


def seconds_of(
    arm: Callable[[], object], device: torch.device, *, captured: bool = True
) -> Callable[[], float]:
    """What runs ``arm`` once more and says how long it took: on a GPU a rested burst of replays of
    a graph of it, or of launches if it is not to be ``captured`` (a large copy is a slower one in a
    graph), once by the clock elsewhere."""
    if device.type != "cuda":

        def timed() -> float:
            start = time.perf_counter()
            arm()
            return time.perf_counter() - start

        return timed
    launch = _graph_of(arm).replay if captured else arm
    _burst(launch, 1)
    count = max(1, min(_MOST_REPLAYS, round(_COUNTED / _burst(launch, 1))))
    # a replay reads what the arm was made of, which must live as long
    held = launch, arm

    def rested() -> float:
        time.sleep(_REST_SECONDS)
        return _burst(held[0], count)

    return rested


def _graph_of(arm: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arm()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return graph


def _burst(launch: Callable[[], object], count: int) -> float:
    """Seconds of a launch, in the mean of ``count`` behind half as many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(-(-count // 2)):
        launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
