"""Cost model calibration: times kernels once per shape on the device, and caches the times.

A few launches of the work-list kernel determine the five numbers of a cost model. A launch takes
``launch + rounds * (start + keys * per_key)`` while all programs are busy, and ``launch + start +
keys * per_key_alone`` while few are. The fastest of several tiles is used.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from looseleaf.attention.plan.cost_model import (
    CostModel,
    GatherCost,
    TileCost,
    cost_model_of,
    other_tiles,
)
from looseleaf.errors import CalibrationFailed
from looseleaf.ops.native.native_build import cache_folder
from looseleaf.ops.partial_attention.work_list import Tile

_log = logging.getLogger(__name__)

# keys of a unit: long launches read past the GPU's cache
SHORT, LONG = 256, 1024
# rows in a merge, and states of each
MERGED_ROWS, FEW_STATES, MANY_STATES = 64, 4, 36
# larger multiples of the built-in cost are disturbed measurements
_PLAUSIBLE = 20.0
_KERNELS = (
    "partial_attention",
    "hopper/attention",
    "hopper/barriers",
    "hopper/entries",
    "hopper/fetch",
    "hopper/tiles",
    "scores",
    "merge_states",
    "finish_rows",
)


@runtime_checkable
class Probe(Protocol):
    """Runs attention on a device and returns the time in microseconds."""

    def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
        """One launch over ``items`` items of ``keys`` keys, each read by ``rows`` rows;
        ``readers`` consecutive items read the same keys."""
        ...

    def merge(self, rows: int, states: int) -> float:
        """One launch that merges ``states`` states of each of ``rows`` rows."""
        ...


OnLaunch = Callable[[int, int], None]
"""Called with the number of timed launches and the total."""


@dataclass
class _ReportingProbe:
    """A probe that reports every timed launch of ``total``."""

    probe: Probe
    total: int
    on_launch: OnLaunch
    timed: int = 0

    def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
        return self._report(self.probe.attend(tile, rows, items, keys, readers))

    def merge(self, rows: int, states: int) -> float:
        return self._report(self.probe.merge(rows, states))

    def _report(self, time: float) -> float:
        self.timed += 1
        self.on_launch(self.timed, self.total)
        return time


@dataclass(frozen=True)
class Shape:
    """Inputs of the costs besides the device: heads, and the dtypes of queries and pages; whether
    keys are the values, after their ``rotary_dim``."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    latent: bool = False
    rotary_dim: int | None = None


@dataclass(frozen=True)
class MeasuredCosts:
    """A cost model; ``source`` is ``measured``, ``cached`` or ``built-in``, with the reason."""

    model: CostModel
    source: str
    reason: str = ""


def measure_costs(
    probe: Probe,
    built_in: CostModel,
    shape: Shape,
    alternatives: Callable[[Tile], Sequence[Tile]] = lambda tile: (),
    on_launch: OnLaunch = lambda completed, total: None,
) -> CostModel:
    """The costs that ``probe`` measures, for the tiles of ``built_in`` or faster ``alternatives``.
    Unmeasurable costs, such as the gain from gathering keys, stay as built in.

    Raises CalibrationFailed for times that fit no cost model.
    """
    group = shape.num_qo_heads // shape.num_kv_heads
    other_tiles_of = {
        cost.tile: alternatives(cost.tile) for cost in (built_in.narrow, built_in.wide)
    }
    tiles = sum(1 + len(other_tiles_of[cost.tile]) for cost in (built_in.narrow, built_in.wide))
    # five for each tile, one launch, two merges
    probe = _ReportingProbe(probe, 5 * tiles + 3, on_launch)

    def fastest(usual: TileCost, rows: int, readers: int) -> TileCost:
        costs = [_tile_cost(probe, usual, rows, readers, shape.num_kv_heads)]
        processors = usual.programs // usual.tile.programs_per_sm
        for tile in other_tiles_of[usual.tile]:
            guess = replace(usual, tile=tile, programs=tile.programs_per_sm * processors)
            costs.append(_tile_cost(probe, guess, rows, readers, shape.num_kv_heads))
        return min(costs, key=lambda cost: (cost.start + LONG * cost.per_key) / cost.programs)

    narrow = fastest(built_in.narrow, 1, 1)
    # wide tiles serve shared keys: of two readers of the same keys, one reads memory
    wide = fastest(built_in.wide, max(1, built_in.wide.tile.block_m // group), 2)
    alone = probe.attend(narrow.tile, 1, 1, SHORT, 1)
    launch = alone - narrow.start - SHORT * narrow.per_key_alone
    merging = probe.merge(MERGED_ROWS, MANY_STATES) - probe.merge(MERGED_ROWS, FEW_STATES)
    states = MERGED_ROWS * shape.num_kv_heads * (MANY_STATES - FEW_STATES)
    model = replace(
        built_in,
        narrow=narrow,
        wide=wide,
        launch=max(launch, 0.0),
        per_state=max(merging / states, 0.0),
    )
    if not model.launch < _PLAUSIBLE * built_in.launch:
        raise CalibrationFailed(f"a launch of {model.launch:.3g} us is not plausible")
    return model


def _tile_cost(
    probe: Probe, guess: TileCost, rows: int, readers: int, num_kv_heads: int
) -> TileCost:
    tile, programs = guess.tile, guess.programs
    # whole rounds keep every program busy
    items = math.lcm(programs, num_kv_heads * readers) // num_kv_heads
    rounds = items * num_kv_heads // programs
    short, long = (probe.attend(tile, rows, items, keys, readers) for keys in (SHORT, LONG))
    twice = probe.attend(tile, rows, 2 * items, SHORT, readers)
    alone_short, alone_long = (probe.attend(tile, rows, 1, keys, 1) for keys in (SHORT, LONG))
    per_key = (long - short) / rounds / (LONG - SHORT)
    start = (twice - short) / rounds - SHORT * per_key
    alone = (alone_long - alone_short) / (LONG - SHORT)
    for name, value, usual in (
        ("a key", per_key, guess.per_key),
        ("a key read alone", alone, guess.per_key_alone),
        ("the start of a unit", start, guess.start),
    ):
        if not 0 < value < _PLAUSIBLE * usual:
            raise CalibrationFailed(f"{value:.3g} us for {name} with {tile} is not plausible")
    # a lone key is never slower than a key in a full launch: a larger value is noise
    return replace(guess, start=start, per_key=per_key, per_key_alone=min(alone, per_key))


def costs_of(
    device: torch.device,
    shape: Shape,
    *,
    make_probe: Callable[[torch.device, Shape], Probe],
    folder: Path | None = None,
    on_launch: OnLaunch = lambda completed, total: None,
) -> MeasuredCosts:
    """The costs of ``shape`` on ``device``: from disk, or measured and cached there.

    Falls back to built-in costs, with a warning in the log, where measuring fails: on a CPU, or
    without enough memory.
    """
    latent = shape.latent
    built_in = cost_model_of(device, shape.head_dim, shape.kv_dtype.itemsize, latent=latent)
    if device.type != "cuda":
        return _built_in(built_in, f"kernels are not compiled for {device.type}")
    name = torch.cuda.get_device_name(device)
    path = (folder or cache_folder().parent / "costs") / f"{_identity(name, shape, built_in)}.json"
    if (cached := _read(path)) is not None:
        return MeasuredCosts(cached, "cached")
    _log.info("measuring the costs of attention on %s; later starts read them from %s", name, path)
    try:
        model = measure_costs(
            make_probe(device, shape),
            built_in,
            shape,
            lambda tile: other_tiles(
                device, tile, shape.head_dim, shape.kv_dtype.itemsize, latent=latent
            ),
            on_launch,
        )
    except (CalibrationFailed, torch.cuda.OutOfMemoryError) as error:
        return _built_in(built_in, str(error))
    _write(path, model)
    return MeasuredCosts(model, "measured")


def _built_in(model: CostModel, reason: str) -> MeasuredCosts:
    _log.warning("attention plans use built-in costs instead of measured ones: %s", reason)
    return MeasuredCosts(model, "built-in", reason)


def _identity(device_name: str, shape: Shape, built_in: CostModel) -> str:
    """Cache key of everything that the costs depend on, kernel sources included."""
    parts: Sequence[Any] = (
        device_name, _kernel_sources(), torch.__version__, *astuple(shape), built_in,
    )  # fmt: skip
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _kernel_sources() -> str:
    """The kernels' source text: changed kernels are measured anew."""
    folder = resources.files("looseleaf.ops")
    return "".join(
        folder.joinpath(*name.split("/"), "kernel.py").read_text("utf-8") for name in _KERNELS
    )


def _read(path: Path) -> CostModel | None:
    """The cached costs at ``path``; None if absent or unreadable."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        tiles = {
            name: TileCost(**(fields[name] | {"tile": Tile(**fields[name]["tile"])}))
            for name in ("narrow", "wide")
        }
        gather = GatherCost(**fields["gather"]) if fields["gather"] else None
        return CostModel(**(fields | tiles | {"gather": gather}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, model: CostModel) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump(asdict(model), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("cannot write measured costs to %s: %s", path.parent, error)
