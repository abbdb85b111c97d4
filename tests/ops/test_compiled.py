"""Kernels are counted as they become ready, and looked for once."""

import gc
import sys
from itertools import count as numbered
from types import ModuleType
from typing import Any

import pytest

from looseleaf.ops.compiled import num_compiled


class Kernel:
    """What triton keeps of a kernel, as far as it is counted."""

    def __init__(self) -> None:
        self.device_caches: dict[int, tuple[dict[str, object]]] = {}


class Module(ModuleType):
    """A module of kernels that counts how often it is looked through."""

    looks = 0
    kernel = Kernel()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        self.looks += 1
        return {"kernel": self.kernel, "other": 1}


def test_what_becomes_ready_is_counted_and_modules_are_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, name = num_compiled(), "looseleaf.ops.made_up.kernel"
    module = Module(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert num_compiled() == before
    looks = module.looks
    for count in range(1, 9):
        module.kernel.device_caches.setdefault(count % 2, ({},))[0][str(count)] = object()
        assert num_compiled() == before + count
    assert module.looks == looks
    monkeypatch.delitem(sys.modules, name)
    assert num_compiled() == before


def test_modules_that_are_imported_meanwhile_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads import while an engine counts: that had ended an engine, and all answers."""
    made, names = ModuleType("made_up"), numbered()
    before = set(sys.modules)

    def imports(phase: str, _: dict[str, int]) -> None:
        sys.modules[f"made_up.{next(names)}"] = made

    threshold = gc.get_threshold()
    # wherever an object is made, somebody imports
    gc.callbacks.append(imports)
    gc.set_threshold(1)
    try:
        for _ in range(20):
            num_compiled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(imports)
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert next(names) > 0
