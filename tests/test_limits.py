"""The size limits catch what they should, and nothing else."""

from pathlib import Path

import pytest

from tools.check_limits import excesses_of_file


def function(*, lines: int, parameters: int = 1, decorator: str = "", docstring: int = 0) -> str:
    names = ", ".join(f"p{i}" for i in range(parameters))
    docs = ['    """Says.', *["    more"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join([decorator, f"def f(self, {names}):", *docs, *["    pass"] * lines, ""])


@pytest.mark.parametrize(
    ("source", "excess"),
    [
        (function(lines=80, parameters=8, docstring=30), None),
        (function(lines=81), "f: 81 lines, limit 80"),
        (function(lines=81, docstring=5), "f: 81 lines, limit 80"),
        (function(lines=1, parameters=9), "f: 9 parameters, limit 8"),
        (function(lines=120, parameters=30, decorator="@triton.jit"), None),
        (function(lines=120, parameters=30, decorator="@triton.jit(do_not_specialize=[])"), None),
        (function(lines=121, decorator="@triton.jit"), "f: 121 lines, limit 120"),
        ("x = 1\n" * 500, None),
        ("x = 1\n" * 501, "501 lines, limit 500"),
    ],
)
def test_an_excess_is_named(tmp_path: Path, source: str, excess: str | None) -> None:
    path = tmp_path / "page.py"
    path.write_text(source, "utf-8")
    found = list(excesses_of_file(path))
    assert len(found) == (excess is not None)
    assert all(line.endswith(f": {excess}") for line in found)
