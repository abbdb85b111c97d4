"""Times of a few launches on a GPU: a captured graph, replayed after a pause.

A card under long load is at its power limit, so its speed depends on earlier work. Without a pause,
equal arms differ by 3 % between rounds, with a pause of 12 ms by less than 1 % (docs/log.md). Every
figure therefore covers a few milliseconds after a pause. The first replays are not counted, because
clocks still rise. A published figure must mention the pause.
"""

import time
from collections.abc import Callable

import torch

_REST_SECONDS = 0.012
# counted seconds of a burst, and its maximal number of replays
_COUNTED, _MOST_REPLAYS = 2e-3, 64


def seconds_of(
    arm: Callable[[], object], device: torch.device, *, captured: bool = True
) -> Callable[[], float]:
    """A timer of ``arm`` (s).

    On a GPU it times a burst of graph replays after a pause, or of launches without ``captured``: a
    large copy is slower in a graph. On a CPU it times one call by the wall clock."""
    if device.type != "cuda":

        def timer() -> float:
            start = time.perf_counter()
            arm()
            return time.perf_counter() - start

        return timer
    launch = _graph_of(arm).replay if captured else arm
    _burst(launch, 1)
    count = max(1, min(_MOST_REPLAYS, round(_COUNTED / _burst(launch, 1))))
    # a replay reads memory of the arm, so the timer keeps both alive
    live = launch, arm

    def burst_timer() -> float:
        time.sleep(_REST_SECONDS)
        return _burst(live[0], count)

    return burst_timer


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
    """Mean seconds of ``count`` launches, after half as many uncounted ones."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(-(-count // 2)):
        launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
