"""Printed commands exist: their flags, their ways to install, their names of models and selectors.

`test_blocks` runs blocks. Here are also commands within sentences, in `deploy/`, in examples and in
error messages, and blocks that are too slow to run.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from looseleaf.assets import REFERENCE_MODELS
from looseleaf.cli import app
from looseleaf.config import FuseSelector
from tests.docs.blocks import PAGES, ROOT, blocks

# a log of what was done keeps the names of its day
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md", ROOT / "training" / "NOTES.md"}
PAGES_OF_TODAY = [page for page in PAGES if page not in HISTORY]
SOURCES = [
    *PAGES_OF_TODAY,
    *(path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix != ".json"),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.html")),
]
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
)
CLIENTS = {"openai", "langchain-openai", "llama-index-llms-openai-like"}
PACKAGES = {*CLIENTS, "torch", "triton", "huggingface_hub", "flashinfer-python"}
_FLAGS_OF_PIP = {"--constraint", "constraints/cpu.txt", "--quiet", "--editable"}
ACTIVATION = ". .venv/bin/activate"


def printed_commands() -> Iterator[tuple[str, str]]:
    """Place and text of each `looseleaf …` in the pages, in a block or within a sentence."""
    for page in PAGES_OF_TODAY:
        name = page.relative_to(ROOT)
        text = page.read_text("utf-8")
        fenced = [block for block in blocks(page) if block.language == "sh"]
        for block in fenced:
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+# .*", "", line).strip()
                if command.startswith("looseleaf "):
                    yield f"{name}:{block.line}", command
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for span in re.findall(r"`(looseleaf\s[^`]+)`", prose):
            yield str(name), " ".join(span.split())


COMMANDS = sorted(set(printed_commands()))


def parse(words: list[str]) -> None:
    """Reads ``words`` with the parser of their command; raises UsageError for a flag it lacks."""
    command: click.Command = app
    context = click.Context(command, info_name="looseleaf")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] in ("NAME", "…", "..."):  # a page says that there are several
            return
        name, *words = words
        inner = command.get_command(context, name)
        if inner is None:
            raise click.UsageError(f"no command {name}")
        command = inner
        context = click.Context(command, parent=context, info_name=name)
    command.make_parser(context).parse_args(args=words)


@pytest.mark.parametrize(("place", "text"), COMMANDS)
def test_a_printed_command_has_only_flags_that_exist(place: str, text: str) -> None:
    words = [word for word in shlex.split(text)[1:] if word not in ("…", "...")]
    try:
        parse(words)
    except click.BadOptionUsage as error:
        # a sentence may name a flag without its value
        assert "requires" in error.format_message(), place
    except click.UsageError as error:
        pytest.fail(f"{place}: {text}: {error.format_message()}")


def test_a_flag_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        parse(["ask", "--documents", "a.txt"])
    assert len(COMMANDS) > 40


def _installs(text: str) -> Iterator[str]:
    """What follows `pip install`, up to the end of the command."""
    for match in re.finditer(
        r"pip install ([^`\n;)\"|]*?)(?= in a checkout|, or give|\.? Start|[`\n;)\"|]|$)", text
    ):
        yield match[1]


def _is_allowed(arguments: str) -> bool:
    """An own checkout, or packages of `PACKAGES`; this project is on no index."""
    words = shlex.split(arguments.replace("\\", "").strip())
    if not words or words == ["..."]:
        return False
    for word in words:
        if word in ("./lab", "./lab[llamacpp]"):
            continue
        extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        if extras and set((extras[1] or "").split(",")) - {""} <= EXTRAS:
            continue
        if word not in PACKAGES | _FLAGS_OF_PIP:
            return False
    return True


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if "pip install" in path.read_text("utf-8")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_printed_installation_works_as_printed(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.name == "errors.py":
        text = text.replace("{','.join(extras)}", "serve")
    for arguments in _installs(text):
        assert _is_allowed(arguments), f"pip install {arguments}"


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [("'.[serve]'", True), (".", True), ("looseleaf", False), ("'.[servee]'", False)],
)
def test_an_installation_is_of_a_checkout_with_extras_that_exist(
    arguments: str, allowed: bool
) -> None:
    assert _is_allowed(arguments) is allowed


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_activates_the_environment_before_its_first_command(page: Path) -> None:
    """`make demo` installs into .venv, so that a new shell knows no `looseleaf`."""
    lines = [
        line.strip()
        for block in blocks(page)
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    commands = [n for n, line in enumerate(lines) if line.startswith("looseleaf ")]
    activations = [n for n, line in enumerate(lines) if line.startswith(ACTIVATION)]
    if commands or page.parent.name == "howto":
        assert activations, "activate .venv at the top"
        assert activations[0] < min(commands, default=len(lines))
    assert not any(".venv/bin/looseleaf" in line for line in lines)


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if re.search("looseleaf-|--checkpoint", path.read_text("utf-8"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_reference_model_has_one_name(path: Path) -> None:
    if path.parent.name == "assets" and path.suffix == ".py":
        return  # takes earlier names
    text = path.read_text("utf-8")
    assert not re.search(r"looseleaf-(block|causal)", text)
    for name in re.findall(r"\blooseleaf-reference[\w-]*", text):
        assert name in REFERENCE_MODELS
    assert not re.search(r"--checkpoint (block|causal)\b", text)


def test_the_page_calls_selectors_as_python_and_the_command_line_do() -> None:
    html = (ROOT / "src/looseleaf/server/static/index.html").read_text("utf-8")
    (chooser,) = re.findall(r'<select id="fuse">(.*?)</select>', html, re.DOTALL)
    options: list[Any] = re.findall(r'<option value="(\w*)">([^<]*)</option>', chooser)
    assert len(options) > 4
    for value, label in options:
        name = value or "none"
        assert name in get_args(FuseSelector)
        assert label == name or label.startswith(f"{name}: ")
