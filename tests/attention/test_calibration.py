"""Costs measured on a device are those that its times follow, and are measured once."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from looseleaf.attention.plan import probe as module
from looseleaf.attention.plan.calibration import Shape, costs_of, measure_costs
from looseleaf.attention.plan.cost_model import CostModel, TileCost, default_cost_model, other_tiles
from looseleaf.attention.plan.probe import DeviceProbe
from looseleaf.errors import CalibrationFailed
from looseleaf.ops.partial_attention.work_list import Tile

SHAPE = Shape(32, 8, 128, 16, torch.bfloat16, torch.bfloat16)
BUILT_IN = default_cost_model(128, 2, 132, hopper=True)
CPU = torch.device("cpu")


class Device:
    """Takes as long as a cost model says, and a share more or less."""

    def __init__(self, truth: CostModel, noise: float = 0.0, num_kv_heads: int = 8) -> None:
        self.truth, self.noise, self.num_kv_heads, self.launches = truth, noise, num_kv_heads, 0

    def cost_of(self, tile: Tile) -> TileCost:
        return self.truth.wide if tile == self.truth.wide.tile else self.truth.narrow

    def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
        cost, units = self.cost_of(tile), items * self.num_kv_heads
        assert items == 1 or items % readers == 0
        return self.said(self.truth.launch + cost.makespan(units, keys, units * keys))

    def merge(self, rows: int, states: int) -> float:
        return self.said(3.0 + self.truth.per_state * rows * self.num_kv_heads * states)

    def said(self, exact: float) -> float:
        self.launches += 1
        return exact * (1 + self.noise * (-1) ** self.launches)


def slower(model: CostModel, by: float) -> CostModel:
    def tile(cost: TileCost) -> TileCost:
        times = {name: getattr(cost, name) * by for name in ("start", "per_key", "per_key_alone")}
        return replace(cost, **times)

    return CostModel(tile(model.narrow), tile(model.wide), model.launch * by, model.per_state * by)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("by", [0.3, 1.0, 4.0])
def test_measured_costs_are_those_that_the_times_follow(by: float, num_kv_heads: int) -> None:
    truth = slower(BUILT_IN, by)
    shape = replace(SHAPE, num_kv_heads=num_kv_heads, num_qo_heads=4 * num_kv_heads)
    found = measure_costs(Device(truth, num_kv_heads=num_kv_heads), BUILT_IN, shape)
    assert found.per_state == pytest.approx(truth.per_state)
    assert found.launch == pytest.approx(truth.launch)
    for name in ("narrow", "wide"):
        mine, true = getattr(found, name), getattr(truth, name)
        assert mine.tile == true.tile
        assert mine.programs == true.programs
        for cost in ("start", "per_key", "per_key_alone"):
            assert getattr(mine, cost) == pytest.approx(getattr(true, cost)), (name, cost)


def test_the_wide_tile_is_measured_by_keys_that_are_shared() -> None:
    """On a card whose memory brings keys more slowly than all programs could read them."""
    per_key = 1.9 * BUILT_IN.wide.per_key / BUILT_IN.wide.programs

    class Starved(Device):
        def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
            taken = super().attend(tile, rows, items, keys, readers)
            if tile != BUILT_IN.wide.tile:
                return taken
            brought = items // readers * self.num_kv_heads * keys * per_key
            return max(BUILT_IN.launch + brought, taken)

    found = measure_costs(Starved(BUILT_IN), BUILT_IN, SHAPE)
    assert found.wide.per_key == pytest.approx(BUILT_IN.wide.per_key)


def test_what_a_probe_does_not_see_is_as_built_in() -> None:
    found = measure_costs(Device(slower(BUILT_IN, 2.0)), BUILT_IN, SHAPE)
    assert found.gather == BUILT_IN.gather is not None
    assert found.one_group == BUILT_IN.one_group > 0


def test_a_little_noise_changes_the_costs_a_little() -> None:
    found = measure_costs(Device(BUILT_IN, noise=0.01), BUILT_IN, SHAPE)
    assert found.narrow.per_key == pytest.approx(BUILT_IN.narrow.per_key, rel=0.05)
    assert found.wide.per_key == pytest.approx(BUILT_IN.wide.per_key, rel=0.05)


@pytest.mark.parametrize("others", [0, 3])
def test_progress_is_told_of_every_launch_and_ends_when_all_are_timed(others: int) -> None:
    told: list[tuple[int, int]] = []

    def alternatives(tile: Tile) -> list[Tile]:
        return [replace(tile, block_n=16 * (n + 1)) for n in range(others)]

    def hear(done: int, total: int) -> None:
        told.append((done, total))

    measure_costs(Device(BUILT_IN), BUILT_IN, SHAPE, alternatives, hear)
    total = len(told)
    assert told == [(done + 1, total) for done in range(total)]


def test_times_that_make_no_sense_are_refused() -> None:
    class Frozen(Device):
        def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
            return 5.0

    with pytest.raises(CalibrationFailed, match="not plausible"):
        measure_costs(Frozen(BUILT_IN), BUILT_IN, SHAPE)
    with pytest.raises(CalibrationFailed, match="not plausible"):
        measure_costs(Device(slower(BUILT_IN, 1000.0)), BUILT_IN, SHAPE)


def test_the_faster_of_several_tiles_is_taken() -> None:
    other = Tile(64, 128, 4, 2, 2)

    class Uneven(Device):
        def cost_of(self, tile: Tile) -> TileCost:
            cost = super().cost_of(tile)
            return replace(cost, per_key=0.9 * cost.per_key) if tile == other else cost

    def alternatives(tile: Tile) -> list[Tile]:
        return [other, Tile(64, 32, 4, 2, 2)] if tile == BUILT_IN.narrow.tile else []

    found = measure_costs(Uneven(BUILT_IN), BUILT_IN, SHAPE, alternatives)
    assert found.narrow.tile == other
    assert found.narrow.per_key == pytest.approx(0.9 * BUILT_IN.narrow.per_key)
    assert found.wide.tile == BUILT_IN.wide.tile


class Card:
    multi_processor_count, major = 132, 9


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that has a name and properties, and nothing else."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    return torch.device("cuda")


def test_costs_are_measured_once_and_kept(card: torch.device, tmp_path: Path) -> None:
    truth, made = slower(BUILT_IN, 2.0), []

    def probe(device: torch.device, shape: Shape) -> Device:
        made.append(shape)
        return Device(truth)

    first = costs_of(card, SHAPE, make_probe=probe, folder=tmp_path)
    second = costs_of(card, SHAPE, make_probe=probe, folder=tmp_path)
    assert (first.source, second.source) == ("measured", "cached")
    assert first.model == second.model
    assert made == [SHAPE]
    # another shape, or other kernels, are measured anew
    costs_of(card, replace(SHAPE, kv_dtype=torch.float8_e4m3fn), make_probe=probe, folder=tmp_path)
    assert len(made) == 2
    for path in tmp_path.iterdir():
        path.write_text("{")
    assert costs_of(card, SHAPE, make_probe=probe, folder=tmp_path).source == "measured"


def test_where_nothing_can_be_measured_built_in_costs_are_used_and_the_log_says_why(
    card: torch.device,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe(device: torch.device, shape: Shape) -> Device:
        raise torch.cuda.OutOfMemoryError("no room")

    for device, reason in ((card, "no room"), (CPU, "not compiled for cpu")):
        with caplog.at_level(logging.WARNING):
            found = costs_of(device, SHAPE, make_probe=probe, folder=tmp_path)
        assert found.source == "built-in"
        assert reason in found.reason
        assert reason in caplog.text
    assert not [*tmp_path.iterdir()]


def test_other_tiles_fit_the_shared_memory(card: torch.device) -> None:
    assert other_tiles(card, BUILT_IN.narrow.tile, 128, 2) == []
    for itemsize in (1, 2, 4):
        tile = default_cost_model(256, itemsize, 132).narrow.tile
        others = other_tiles(card, tile, 256, itemsize)
        assert others
        assert tile not in others
        for one in others:
            taken = (one.block_m + 2 * one.num_stages * one.block_n) * 256 * itemsize
            assert taken * one.programs_per_sm <= 227 * 1024


def test_the_probe_launches_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with a timer that only looks at the states."""
    shape = Shape(4, 2, 32, 16, torch.float32, torch.float32)
    seen = []
    operator = module.partial_attention

    def watched(q, k_pages, v_pages, work, *rest, **options):  # type: ignore[no-untyped-def]
        state = operator(q, k_pages, v_pages, work, *rest, **options)
        seen.append((int(work.num_items[0]), len(q), state.lse.isfinite().all().item()))
        return state

    monkeypatch.setattr(module, "partial_attention", watched)
    monkeypatch.setattr(module, "_LAUNCHES", 1)
    monkeypatch.setattr(DeviceProbe, "_microseconds", lambda self, launch: launch() or 1.0)
    probe = DeviceProbe(CPU, shape, max_items=2)
    tile = Tile(16, 32, 4, 2, 2)
    assert probe.attend(tile, 3, 2, 64, 1) == 1.0
    assert probe.attend(tile, 3, 4, 64, 2) == 1.0
    assert seen == [(2, 3, True), (4, 3, True)]
    assert probe.merge(3, 2) == 1.0
