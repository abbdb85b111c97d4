"""The package as a newcomer meets it: quick to import and honest about its names."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import looseleaf

SOURCE = Path(looseleaf.__file__).parent
HEAVY = ("torch", "transformers", "triton", "numpy", "jaxtyping", "rich", "typer")


def run_fresh(code: str) -> str:
    """The output of ``code`` in a new interpreter with this source tree first on its path."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return process.stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    code = f"import sys, looseleaf; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_fresh(code) == "[]"


def test_configuration_needs_no_torch() -> None:
    code = "import sys, looseleaf; looseleaf.EngineConfig(); looseleaf.SamplingParams()"
    assert run_fresh(code + "; print('torch' in sys.modules)") == "False"


def test_import_is_quick() -> None:
    # processor time, which other programs on the machine do not lengthen
    code = "import time; t = time.process_time(); import looseleaf; print(time.process_time() - t)"
    assert min(float(run_fresh(code)) for _ in range(3)) < 0.05


def test_the_help_of_the_command_line_pulls_in_nothing_heavy() -> None:
    code = f"""
import sys
from looseleaf.cli import app
app(["--help"], standalone_mode=False)
app(["bench", "--help"], standalone_mode=False)
print([m for m in {HEAVY!r} if m in sys.modules])
"""
    assert run_fresh(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", looseleaf.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(looseleaf, name) is not None
    assert name in dir(looseleaf)


def test_the_type_checker_sees_the_same_homes_as_the_interpreter() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf-8"))
    declared = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("looseleaf.")
        for alias in node.names
    }
    assert declared == looseleaf._MODULES
    assert set(looseleaf.__all__) == {*declared, "__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Binder'"):
        looseleaf.Binder  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("looseleaf.binder")


def test_everything_but_kernels_imports_without_triton_and_transformers() -> None:
    code = """
import importlib, pkgutil, sys
import looseleaf
sys.modules["triton"] = None
sys.modules["transformers"] = None
for module in pkgutil.walk_packages(looseleaf.__path__, "looseleaf."):
    if module.name.startswith("looseleaf.ray"):
        continue
    if not module.name.endswith((".kernel", ".__main__", "testing.compile")):
        importlib.import_module(module.name)
"""
    assert run_fresh(code) == ""
