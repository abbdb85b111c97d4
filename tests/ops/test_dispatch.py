"""Which implementation runs: the one asked for, or an error; and what an import brings with it."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import looseleaf
from looseleaf.errors import InvalidOption
from looseleaf.ops.dispatch import Implementation, choose


def test_auto_takes_the_device_s_own() -> None:
    assert choose("auto", torch.zeros(1)) == "reference"
    assert choose("auto", torch.zeros(1), cpu="cpu") == "cpu"


def test_an_unknown_implementation_is_refused_by_name() -> None:
    # callers without the type checks of the tests get the sentence
    unchecked = inspect.unwrap(choose)
    with pytest.raises(InvalidOption, match="cudnn"):
        unchecked("cudnn", torch.zeros(1))


def test_cpu_is_what_auto_takes_on_a_cpu() -> None:
    assert choose("cpu", torch.zeros(1)) == "reference"
    assert choose("cpu", torch.zeros(1), cpu="cpu") == "cpu"
    assert choose("reference", torch.zeros(1), cpu="cpu") == "reference"


def test_triton_is_not_for_tensors_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", torch.zeros(1)) == "triton"
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(InvalidOption, match="these are on the CPU: move them, or use"):
            choose("triton", torch.zeros(1))


@pytest.mark.parametrize("name", ["cpu", "native"])
def test_who_reads_memory_of_a_cpu_is_not_for_tensors_of_a_gpu(name: Implementation) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    with pytest.raises(InvalidOption, match="these are on a GPU"):
        choose(name, torch.zeros(1).as_subclass(OnGpu), native=True)


def test_references_run_where_triton_can_not_be_imported() -> None:
    """A fresh interpreter, in which importing triton raises."""
    script = """
        import sys
        sys.modules["triton"] = None
        import torch
        from looseleaf.ops.merge_states import merge_states
        from looseleaf.ops.partial_attention import partial_attention
        from looseleaf.ops.prefill_attention import prefill_attention
        from looseleaf.ops.rotate import rotate
        from looseleaf.ops.store_kv import store_kv
        from looseleaf_lab.testing.build import SceneBuilder
        from looseleaf_lab.testing.lists import span_list, work_list
        from looseleaf_lab.testing.scene import Shape

        scene = SceneBuilder(0, Shape()).decode()
        pages = scene.k_pages, scene.v_pages
        work = work_list(scene)
        rest = scene.rotation, scene.rule, scene.slot_positions, "reference"
        states = partial_attention(scene.q, *pages, work, *rest)
        merge_states(states, work.row_state_indptr, implementation="reference")
        positions = torch.arange(len(scene.q))
        rotate(scene.q, positions, scene.rotation, "reference")
        k = scene.q[:, :2]
        store_kv(k, k, positions, positions, scene.rotation, *pages, "reference")
        scene, rows_of, spans_of = SceneBuilder(0, Shape()).prefill()
        spans = span_list(scene, rows_of, spans_of, tile_rows=8)
        pages = scene.k_pages, scene.v_pages
        rest = scene.rotation, scene.rule, scene.slot_positions, "reference"
        prefill_attention(scene.q, *pages, spans, *rest)
        try:
            rotate(scene.q, positions, scene.rotation, "triton")
        except ImportError:
            print("asked for by name, triton raises")
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    source = str(Path(looseleaf.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "asked for by name, triton raises\n"
