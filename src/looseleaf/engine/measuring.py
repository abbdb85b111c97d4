"""The tiering of an engine, with what must be known of it measured first: tiers and model."""

import time

import torch

from looseleaf.attention.groups import ReadSpan
from looseleaf.attention.paged import StepRows
from looseleaf.attention.plan import PrefillChunk
from looseleaf.engine.pace import ComputePace, count_pairs
from looseleaf.engine.pacing import LoadingController
from looseleaf.engine.runner import Runner
from looseleaf.engine.tiering import Tiering
from looseleaf.kv.store import SegmentStore
from looseleaf.tiers import Tiers

_MOST_TOKENS = 1024
# about how long the measurement may take, in seconds; a pass that was begun is finished
_LONGEST = 1.0


def make_tiering(tiers: Tiers | None, store: SegmentStore, runner: Runner) -> Tiering:
    """The tiering of an engine that runs nothing yet; measures now, if there are tiers."""
    pace = runner.pace or ComputePace()

    def measured() -> ComputePace:
        # without tiers nobody needs to know, until a budget is a time
        if pace.predict(1, 1) is None:
            measure_pace(runner, pace)
        return pace

    if tiers is None:
        return Tiering(store, measured_pace=measured)
    tiers.measure()
    controller = LoadingController(tiers, measured(), runner.model.config.num_layers)
    return Tiering(store, tiers, controller, measured)


@torch.inference_mode()
def measure_pace(runner: Runner, pace: ComputePace) -> None:
    """Time passes of several lengths over pages that nobody uses, each after one that is not
    counted."""
    pool = runner.pool
    positions = runner.attention.rotation.cos.shape[0]
    most = min(_MOST_TOKENS, pool.num_free * pool.page_size, positions)
    pages = pool.allocate(-(-most // pool.page_size)) or []
    begun = time.perf_counter()
    try:
        for rows, keys in ((most // 16, most // 16), (most // 4, most // 4), (most // 4, most)):
            if rows < 1 or time.perf_counter() - begun > _LONGEST:
                break
            for counted in (False, True):
                seconds = _time_pass(runner, pages, rows, keys)
                if counted:
                    pace.observe(rows, count_pairs([(rows, keys)]), seconds)
    finally:
        pool.free(pages)


def _time_pass(runner: Runner, pages: list[int], rows: int, keys: int) -> float:
    model, pool, device = runner.model, runner.pool, runner.model.device
    at = torch.arange(keys - rows, keys, device=device)
    table = torch.tensor(pages, device=device)
    slots = table[at // pool.page_size] * pool.page_size + at % pool.page_size
    chunk = PrefillChunk(range(keys - rows, keys), (ReadSpan(pages, 0, keys, 0),))
    tokens = at % model.config.vocab_size
    wanted = torch.tensor([rows - 1], device=device)
    _wait_for(device)
    begun = time.perf_counter()
    attend = runner.attention.step(StepRows([], [chunk], slots, at, [rows - 1]))
    model.logits(model.forward(tokens, attend, asked=wanted))
    _wait_for(device)
    return time.perf_counter() - begun


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
