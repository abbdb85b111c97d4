"""Kernels that are broken on purpose: the source of a kernel with one expression changed."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

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
        "hopper.spans",
        "position = positions_of_unit(lists, unit, GROUP, BY_HEADS)",
        "position = 1 + positions_of_unit(lists, unit, GROUP, BY_HEADS)",
    ),
}
"""What is wrong: the operator, what its kernel says, and what the broken one says."""

CALLERS = {"hopper.spans": "hopper.attention"}
"""Device functions that another operator's kernel calls, and that operator."""


def kernel_source(operator: str) -> str:
    """The file of an operator's kernel."""
    path = (
        Path(__file__).parents[3]
        / "src"
        / "looseleaf"
        / "ops"
        / operator.replace(".", "/")
        / "kernel.py"
    )
    return path.read_text(encoding="utf-8")


def break_kernel(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> None:
    """Put the broken kernel in the right one's place until the test ends."""
    operator, right, wrong = BREAKS[what]
    source = kernel_source(operator)
    assert source.count(right) == 1, f"{operator} has another kernel now: state how to break it"
    broken = load_copy(monkeypatch, folder, operator, source.replace(right, wrong))
    if operator in CALLERS:
        # which finds the device functions in its own globals
        operator, own = CALLERS[operator], f"looseleaf.ops.{operator}.kernel"
        source = kernel_source(operator)
        assert own in source, f"{operator} does not call {own} any more: state who does"
        broken = load_copy(monkeypatch, folder, operator, source.replace(own, broken.__name__))
    module = import_module(f"looseleaf.ops.{operator}.kernel")
    for name, function in vars(module).items():
        if getattr(function, "__module__", None) == module.__name__ and not name.startswith("_"):
            monkeypatch.setattr(module, name, getattr(broken, name))


def load_copy(
    monkeypatch: pytest.MonkeyPatch, folder: Path, operator: str, source: str
) -> ModuleType:
    """A kernel's file with other ``source``, as a module of its own until the test ends."""
    path = folder / f"broken_{operator.replace('.', '_')}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    # a kernel looks its globals up by the name of its module
    monkeypatch.setitem(sys.modules, path.stem, copy)
    spec.loader.exec_module(copy)
    return copy
