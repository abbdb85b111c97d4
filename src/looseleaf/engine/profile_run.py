"""The profile run: it measures tiers and compute time before an engine starts, for its tiering."""

import time

import numpy as np
import torch

from looseleaf.attention.paged import StepRows
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.tiering.compute_time import ComputeTime, count_keys, count_read
from looseleaf.engine.tiering.load_controller import LoadingController
from looseleaf.engine.tiering.rank_tiering import RankTiering
from looseleaf.engine.tiering.tiering import Tiering
from looseleaf.kv.keys import SegmentKey
from looseleaf.kv.store import SegmentStore
from looseleaf.machine.device import synchronize
from looseleaf.tiers import Claims, Tiers

# tokens of the longest timed pass; on a GPU the host's launches dominate short passes
_MOST_TOKENS, _MOST_TOKENS_GPU = 1024, 8192
# no pass starts after the timed passes have taken this long, in seconds, without compilation
_LONGEST = 0.5


def make_tiering(tiers: Tiers | None, store: SegmentStore, runner: Runner) -> Tiering:
    """The tiering of an idle engine; measures immediately if it has tiers."""
    compute_time = runner.compute_time or ComputeTime()

    ranks = runner.model.ranks

    def measured() -> ComputeTime:
        # without tiers only budgets in seconds need the measurement
        unknown = compute_time.predict(1, 1) is None
        if ranks is not None:
            unknown = ranks.link.decide("compute time", lambda: unknown)
        if unknown:
            measure_compute_time(runner, compute_time)
        return compute_time

    if tiers is None:
        if ranks is not None:
            return RankTiering(store, measured_compute_time=measured, ranks=ranks)
        return Tiering(store, measured_compute_time=measured)
    tiers.measure()
    controller = LoadingController(
        tiers, measured(), runner.model.config.num_layers, runner.replayed_rows
    )
    if ranks is not None:
        return RankTiering(store, tiers, controller, measured, ranks=ranks)
    tiering = Tiering(store, tiers, controller, measured)
    if tiers.shared is not None:

        def is_computing(key: SegmentKey) -> bool:
            segment = store.find(key)
            return segment is not None and not segment.ready

        tiering.claims = Claims(tiers.shared, is_computing)
    return tiering


@torch.inference_mode()
def measure_compute_time(runner: Runner, compute_time: ComputeTime) -> None:
    """Time passes of several lengths over free pages, each after an untimed one.

    The last pass computes every fourth token again."""
    pool = runner.pool
    positions = runner.attention.num_positions
    most = _MOST_TOKENS_GPU if runner.model.device.type == "cuda" else _MOST_TOKENS
    # three quarters of the free pages, because the patch takes a quarter more
    most = min(most, pool.num_free * pool.page_size * 3 // 4, positions)
    pages = pool.allocate(-(-most // pool.page_size)) or []
    patch = pool.allocate(-(-most // (4 * pool.page_size))) or []
    # launches dominate a short pass on a GPU
    first = range(most if runner.runs_ahead else most // 16)
    taken = 0.0
    try:
        for positions_read in (first, range(most // 4), range(most - most // 4, most)):
            if not positions_read or _is_late(runner, taken):
                return
            spans = (ReadSpan(pages, 0, positions_read.stop, 0),)
            seconds = _time_pass(runner, pages, PrefillChunk(positions_read, spans))
            compute_time.observe(len(positions_read), count_keys(positions_read), seconds)
            taken += seconds
        blended = _blended(pages, patch, most)
        pool.set_positions(patch, blended.positions)
        seconds = _time_pass(runner, patch, blended)
        compute_time.observe(len(blended.positions), count_read(blended), seconds, blends=True)
    finally:
        pool.free([*pages, *patch])


def _is_late(runner: Runner, seconds: float) -> bool:
    """Whether no pass starts any more, by the clock of rank 0."""
    ranks, is_late = runner.model.ranks, seconds > _LONGEST
    return is_late if ranks is None else ranks.link.decide("profile run", lambda: is_late)


def _blended(pages: list[int], patch: list[int], most: int) -> PrefillChunk:
    """A pass that computes every fourth of ``most`` tokens again."""
    chosen = np.arange(3, most, 4)
    hidden = np.zeros(-(-most // 32) * 32, dtype=np.bool_)
    hidden[chosen] = True
    bitmap = np.packbits(hidden, bitorder="little").view("<i4")
    cached = ReadSpan(pages, 0, most, 0, bitmap)
    return PrefillChunk(chosen, (cached, ReadSpan(patch, 0, len(chosen), 0, places=chosen)))


def _time_pass(runner: Runner, pages: list[int], chunk: PrefillChunk) -> float:
    """Seconds of the second run of a pass that writes its keys to ``pages``."""
    model, pool, device = runner.model, runner.pool, runner.model.device
    rows, own = len(chunk.positions), chunk.spans[-1]
    at = torch.as_tensor(np.asarray(chunk.positions), device=device)
    nth = at if own.places is None else torch.arange(rows, device=device)
    slots = torch.tensor(pages, device=device)[nth // pool.page_size] * pool.page_size
    step = StepRows([], [chunk], slots + nth % pool.page_size, at, [rows - 1], expands=True)
    tokens, last_row = at % model.config.vocab_size, torch.tensor([rows - 1], device=device)
    for _ in range(2):
        synchronize(device)
        begun = time.perf_counter()
        model.logits(model.forward(tokens, runner.attention.step(step), last_rows=last_row))
        synchronize(device)
    return time.perf_counter() - begun
