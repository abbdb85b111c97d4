"""Messages of ``looseleaf serve`` if it can't run."""

from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec

import pytest

from tests.cli.conftest import Run

# the package has the command by that name
serve = import_module("looseleaf.cli.serve")


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a module be missing."""
    monkeypatch.setattr(serve, "exit_on_sigterm", lambda: None)

    def lack(module: str) -> None:
        monkeypatch.setattr(
            serve, "find_spec", lambda name: None if name == module else ModuleSpec(name, None)
        )

    return lack


@pytest.mark.parametrize("module", serve.NEEDED)
def test_who_installed_the_library_alone_is_told_what_serving_needs(
    module: str, lacking: Callable[[str], None], run: Run
) -> None:
    lacking(module)
    done = run("serve")
    assert done.code == 2
    assert f"serving needs {module}: run pip install '.[serve]' in a checkout" in done.err


def test_windows_is_sent_to_its_linux(lacking: Callable[[str], None], run: Run) -> None:
    lacking("resource")
    done = run("serve")
    assert done.code == 2
    assert "on Windows, run it in WSL" in done.err
