"""What is timed is what runs: on a CPU once a figure, and ceilings are rates of real work."""

import time

import pytest
import torch

from looseleaf_lab.bench.ceilings import measure_ceilings
from looseleaf_lab.bench.replays import seconds_of

CPU = torch.device("cpu")


def test_an_arm_runs_once_for_every_figure() -> None:
    runs: list[float] = []
    timed = seconds_of(lambda: runs.append(time.perf_counter()), CPU)
    assert not runs
    begun = time.perf_counter()
    figures = [timed() for _ in range(3)]
    assert len(runs) == 3
    assert 0 < sum(figures) <= time.perf_counter() - begun


def test_a_floor_is_the_longer_of_moving_and_multiplying() -> None:
    found = measure_ceilings(CPU, torch.float32)
    assert found.floor(found.bytes_per_second, 0) == pytest.approx(1)
    assert found.floor(found.bytes_per_second, 3 * found.flops_per_second) == pytest.approx(3)
