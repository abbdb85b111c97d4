"""Kernels that are broken on purpose: the source of a kernel with one expression changed."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

import pytest

BREAKS = {
    "a merge forgets how much each set weighs": (
        "merge_states",
        "weight = tl.exp(b_lse - pivot)",
        "weight = tl.where(b_lse > float('-inf'), 1.0, 0.0)",
    ),
    "decoding is off by one in a frame": (
        "partial_attention",
        "frame_position = tl.load(row_positions + row, mask=m_row, other=0) - tl.load(",
        "frame_position = 1 + tl.load(row_positions + row, mask=m_row, other=0) - tl.load(",
    ),
    "decoding sees one key less": (
        "partial_attention",
        "bound = tl.load(entry_bound + entry, mask=m_row, other=0)",
        "bound = tl.load(entry_bound + entry, mask=m_row, other=0) - 1",
    ),
    "a prompt is off by one in a frame": (
        "prefill_attention",
        "frame_position = row_position - offset",
        "frame_position = row_position - offset + 1",
    ),
    "Hopper's kernel is off by one in a frame": (
        "hopper_attention",
        "gl.maximum(true_q - offset, 0)",
        "gl.maximum(true_q - offset + 1, 0)",
    ),
}
"""What is wrong: the operator, what its kernel says, and what the broken one says."""


def kernel_source(operator: str) -> str:
    """The file of an operator's kernel."""
    path = Path(__file__).parents[2] / "src" / "looseleaf" / "ops" / operator / "kernel.py"
    return path.read_text(encoding="utf-8")


def break_kernel(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> None:
    """Put the broken kernel in the right one's place until the test ends."""
    operator, right, wrong = BREAKS[what]
    module = import_module(f"looseleaf.ops.{operator}.kernel")
    source = kernel_source(operator)
    assert source.count(right) == 1, f"{operator} has another kernel now: state how to break it"
    path = folder / f"broken_{operator}.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    # a kernel looks its globals up by the name of its module
    monkeypatch.setitem(sys.modules, path.stem, broken)
    spec.loader.exec_module(broken)
    for name, function in vars(module).items():
        if getattr(function, "__module__", None) == module.__name__ and not name.startswith("_"):
            monkeypatch.setattr(module, name, getattr(broken, name))
