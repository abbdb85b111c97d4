"""Size limits of files, functions and parameter lists.

Lines are physical lines. A function's body begins after its docstring. Kernels (``@triton.jit``)
have a separate limit, and no limit of parameters. Prints each excess; exits with 1 on an excess.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "lab", "tests", "training", "tools", "examples")
MAX_FILE_LINES = 500
MAX_EXAMPLE_LINES = 60
MAX_README_LINES = 150
MAX_BODY_LINES = 80
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: Function) -> bool:
    """Whether a decorator is ``triton.jit`` or ``gluon.jit``, called or not."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(target) in ("triton.jit", "gluon.jit", "jit"):
            return True
    return False


def body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0


def num_parameters(function: Function) -> int:
    """The number of parameters without ``self`` and ``cls``."""
    arguments = function.args
    named = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
    starred = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len([name for name in named if name not in ("self", "cls")]) + len(starred)


def excesses_of_function(function: Function) -> Iterator[str]:
    """The excesses of a function."""
    kernel = is_kernel(function)
    limit = MAX_KERNEL_LINES if kernel else MAX_BODY_LINES
    if (lines := body_lines(function)) > limit:
        yield f"{function.name}: {lines} lines, limit {limit}"
    if not kernel and (count := num_parameters(function)) > MAX_PARAMETERS:
        yield f"{function.name}: {count} parameters, limit {MAX_PARAMETERS}"


def excesses_of_file(path: Path) -> Iterator[str]:
    """The excesses of a Python file, as ``path:line: sentence``."""
    source = path.read_text(encoding="utf-8")
    limit = MAX_EXAMPLE_LINES if path.parts[0] == "examples" else MAX_FILE_LINES
    if (lines := len(source.splitlines())) > limit:
        yield f"{path}:1: {lines} lines, limit {limit}"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (f"{path}:{node.lineno}: {excess}" for excess in excesses_of_function(node))


def excesses() -> Iterator[str]:
    """All excesses below the current folder."""
    for folder in FOLDERS:
        for path in sorted(Path(folder).rglob("*.py")):
            yield from excesses_of_file(path)
    readme = Path("README.md")
    if (
        readme.exists()
        and (lines := len(readme.read_text("utf-8").splitlines())) > MAX_README_LINES
    ):
        yield f"{readme}:1: {lines} lines, limit {MAX_README_LINES}"


if __name__ == "__main__":
    lines = list(excesses())
    print("\n".join(lines) if lines else "sizes are within their limits")
    sys.exit(bool(lines))
