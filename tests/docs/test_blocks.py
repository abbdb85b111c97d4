"""Every code block of the README and the site runs as printed, or says why it does not.

Python shares one namespace a page. Commands of the command line run in this process, everything
else in a shell; both in a folder that holds the examples. What is said to a server at the printed
address goes to one that the page itself started, or to one that all pages share.
"""

import ast
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import config

import looseleaf
from looseleaf.cli import main
from looseleaf.cli.serve import option_names
from tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks
from tests.server.running import RunningServer, running_server

PRINTED = "http://127.0.0.1:8000"
README = ROOT / "README.md"
EVERY = [block for page in PAGES for block in blocks(page)]
# these are run where more is asked of them
ELSEWHERE = {
    (README, "python"): "tests/test_readme.py",
    (README, "curl"): "tests/server/test_readme_commands.py",
}
HOWTO = ROOT / "docs" / "howto"
# what a reader sees of the answers that a page prints, by the name of the output
WING = "The archive is in the north wing."
ANSWERS = {
    HOWTO / "long-documents.md": {"answer": WING, "short": WING},
    HOWTO / "long-answers.md": {
        "answer": WING,
        "growing": WING,
        "first": WING,
        "second": "The person who signs travel requests is Mira Tolland.",
        "formed": "Travel requests are signed by Mira Tolland.",
    },
}
# lines of the README, which has no markers
UNRUN_LINES = {
    r"make (demo|test|test-all|venv|check|docs)\b.*": "sets up an environment of its own",
    r".*\b(FOLDER|MODEL|FOLDER_OR_HUB_ID)\b.*": "holds a placeholder",
    r"pip install .*": "installs packages",
    r"\. \.venv/bin/activate": "activates the environment of `make demo`",
    r".*\b(HuggingFaceTB|Qwen)/.*": "needs a model from the hub",
    r"looseleaf chat .*": "reads its questions from a terminal",
}
_SHELL = re.compile(r"[|<>&;$`\\]|\bfor\b|^export\b")


class Reader:
    """Somebody who types what a page prints, in a folder of their own."""

    def __init__(self, folder: Path, shared: "Shared") -> None:
        self.folder, self.shared = folder, shared
        self.namespace: dict[str, object] = {"__name__": "__main__"}
        self.servers = ExitStack()
        self.server: RunningServer | None = None

    def address(self, text: str) -> str:
        """``text`` with the printed address replaced by that of a server."""
        if PRINTED not in text:
            return text
        server = self.server or self.shared.server()
        return text.replace(PRINTED, server.url.rstrip("/"))

    def read(self, block: Block) -> None:
        """Run one block; raises whatever it does."""
        if block.language == "python":
            source = "\n" * block.line + self.address(block.text)
            exec(compile(source, block.place, "exec"), self.namespace)
        elif block.language == "sh":
            self.type(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            assert set(tomllib.loads(block.text)) <= set(option_names())

    def type(self, block: Block) -> None:
        if (block.page, block.text.split()[0]) in ELSEWHERE:
            return
        text = block.text.replace("\\\n", " ")
        if "curl " in text:
            self.shell(text)
            return
        for line in text.splitlines():
            command = re.sub(r"\s+# .*", "", line).strip().removeprefix(".venv/bin/")
            if not command or (block.page == README and unrun(command)):
                continue
            words = shlex.split(command)
            if words[:2] == ["looseleaf", "serve"]:
                self.serve(words[2:])
            elif words[0] == "looseleaf" and not _SHELL.search(command):
                self.call(words)
            else:
                self.shell(command)

    def call(self, words: list[str]) -> None:
        """A command of the command line, without the seconds that a new process takes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            patch.setattr(sys, "stdin", io.StringIO("/quit\n"))
            try:
                main()
            except SystemExit as end:
                assert not end.code, f"{shlex.join(words)} ended with {end.code}"

    def serve(self, options: list[str]) -> None:
        """A server for the rest of the page, instead of the one before."""
        self.servers.close()
        self.server = self.servers.enter_context(running_server(*options))

    def shell(self, script: str) -> None:
        if "curl " in script and not shutil.which("curl"):
            message = "no curl on the PATH: install it"
            required = os.environ.get("REQUIRE_BROWSER") == "1"
            pytest.fail(message) if required else pytest.skip(message)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.address(script)],
            capture_output=True, text=True, timeout=300, check=False, env=environment,
        )  # fmt: skip
        assert process.returncode == 0, f"{script}\n{process.stdout}\n{process.stderr}"
        assert '"error"' not in process.stdout, f"{script}\n{process.stdout}"


class Shared:
    """A server with the reference model for all pages that start none; it begins when needed."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self._server: RunningServer | None = None

    def server(self) -> RunningServer:
        if self._server is None:
            self._server = self.stack.enter_context(running_server())
        return self._server


@pytest.fixture(scope="module", autouse=True)
def as_readers_run_it() -> Iterator[None]:
    """Without the checks of shapes at every call, which readers do not have and which take most of
    the time."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    state = Shared()
    with state.stack:
        yield state


@pytest.fixture
def reader(tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """In a folder with the examples, where ``looseleaf`` is a command."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = tmp_path / "bin" / "looseleaf"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m looseleaf "$@"\n')
    command.chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={command.parent}:$PATH\n")
    monkeypatch.chdir(tmp_path)
    page_reader = Reader(tmp_path, shared)
    with page_reader.servers:
        yield page_reader


def unrun(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in UNRUN_LINES)


def to_run(page: Path) -> list[Block]:
    """The blocks of a page that something is to be done with here."""
    return [
        block
        for block in blocks(page)
        if block.reason is None
        and block.language != "text"
        and (block.page, block.language) not in ELSEWHERE
    ]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if to_run(p)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_block_of_a_page_runs_as_printed(page: Path, reader: Reader) -> None:
    for block in to_run(page):
        reader.read(block)
    for name, text in ANSWERS.get(page, {}).items():
        output: Any = reader.namespace[name]
        assert output.text.strip() == text, f"{page.name} prints a wrong {name}"


@pytest.mark.parametrize("block", EVERY, ids=lambda block: block.place)
def test_every_block_says_what_it_is(block: Block) -> None:
    """So that none is passed over because nobody knew how to run it."""
    assert block.language in LANGUAGES, f"{block.place}: name the language of the block"
    assert block.reason is None or len(block.reason.split()) >= 3, f"{block.place}: say why"


def test_most_blocks_that_could_run_do() -> None:
    code = [block for block in EVERY if block.language in ("python", "sh")]
    run_by_clients = "make test-clients runs it"
    marked = [block for block in code if block.reason not in (None, run_by_clients)]
    reasons = "\n".join(f"{block.place}: {block.reason}" for block in marked)
    assert len(code) > 20
    assert len(marked) <= len(code) / 4, reasons


def docstring_examples() -> Iterator[tuple[str, str]]:
    """Indented code in docstrings of the modules that the reference pages show."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    source = Path(looseleaf.__file__).parent
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source.parent).with_suffix("").parts)
        if not any(name.startswith(module.removesuffix(".__init__")) for name in shown):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (
                doc := ast.get_docstring(node)
            ):
                for code in re.findall(r"\n\n((?:    .*\n?)+)", doc):
                    if re.match(r"    [\w\[\]\"', ]+ = |    \w+\(", code):
                        yield f"{module}.{node.name}", re.sub("^    ", "", code, flags=re.M)


EXAMPLES = list(docstring_examples())


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_of_a_docstring_runs(
    name: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "examples" / "documents")
    names = {public: getattr(looseleaf, public) for public in looseleaf.__all__} | {"Path": Path}
    exec(compile(code, name, "exec"), names)


def test_docstrings_have_examples() -> None:
    assert "looseleaf.llm.llm.LLM" in dict(EXAMPLES)
