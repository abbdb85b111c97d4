"""Engines made, mixed and closed in one process on a CUDA device, and one that nobody closes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
ROOT = Path(__file__).parents[2]
LEFT_OPEN = """
from tools.stress import EngineSpec, Stress, parsed

run = Stress(parsed(["--device=cuda", "--document=500"]))
engines = [run.engine(EngineSpec("host")), run.engine(EngineSpec("host+disk"))]
for _ in range(3):
    for engine in engines:
        run.evict(engine)
        for spec in run.specs[:4]:
            run.add(engine, spec)
        run.run([engine])
for engine in engines:
    engine.tiers.flush()
    engine.tiering.release_pages()
    engine.store.evict_idle()
    for spec in run.specs[:4]:
        run.add(engine, spec)
    engine.step()
raise ValueError("the end")
"""


def ran(*command: str) -> "subprocess.CompletedProcess[str]":
    whole = [sys.executable, *command]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_engines_of_every_kind_answer_as_one_that_is_alone(seed: int) -> None:
    # a process of its own: a fault of the device ends all that comes after it
    document = "1100" if seed == 1 else "400"
    options = f"--device=cuda --seconds=15 --document={document} --seed={seed}"
    done = ran("-m", "tools.stress", *options.split())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_process_with_open_engines_that_load_ends_quietly() -> None:
    done = ran("-c", LEFT_OPEN)
    assert done.returncode == 1 and "terminate" not in done.stderr, done.stderr
    assert done.stderr.strip().endswith("ValueError: the end")
