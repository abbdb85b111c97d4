"""Traces of agents for ``bench agents``: conversations drawn by a seed, in chat messages.

A coding agent reads files, edits them, reads them again, drops and summarizes old tool results and
spawns sub-agents. A retrieval front end sends its files in another order in every turn. A trace in
Mooncake's form lists hashes of blocks; equal hashes become equal blocks of text, one tool result
each. Names and numbers are drawn, so texts compress badly and answers depend on them."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption

Messages = list[dict[str, Any]]
"""The conversation of one request."""

_NAMES = (
    "load", "store", "parse", "render", "merge", "split", "count", "check", "open", "close", "read",
    "write", "send", "take",
)  # fmt: skip
_NOUNS = (
    "page", "row", "key", "table", "file", "line", "part", "index", "frame", "query", "batch",
    "token", "list", "cache",
)  # fmt: skip


@dataclass(frozen=True)
class TraceConfig:
    """``turns`` requests over ``files`` of ``lines`` lines each.

    A prompt has at most ``window`` files; the agent edits one file every ``edit_every`` turns."""

    turns: int = 24
    files: int = 6
    lines: int = 40
    window: int = 4
    edit_every: int = 4
    seed: int = 0


def source_file(rng: random.Random, lines: int) -> list[str]:
    """Lines of functions in a made language."""
    text: list[str] = []
    while len(text) < lines:
        name = f"{rng.choice(_NAMES)}_{rng.choice(_NOUNS)}"
        text += [f"def {name}_{rng.randrange(100)}({rng.choice(_NOUNS)}):"]
        for _ in range(rng.randint(2, 5)):
            called, noun = rng.choice(_NAMES), rng.choice(_NOUNS)
            text.append(f"    {noun} = {called}({rng.choice(_NOUNS)}, {rng.randrange(1000)})")
    return text[:lines]


def coding_agent(config: TraceConfig) -> Iterator[Messages]:
    """An agent whose history holds its latest tool results; older ones are summarized.

    Every sixth request is of a sub-agent, which begins with its own task and some of the files."""
    rng = random.Random(config.seed)
    files = [source_file(rng, config.lines) for _ in range(config.files)]
    system = {"role": "system", "content": "You are a coding agent. Answer briefly."}
    shown: list[int] = []
    for turn in range(config.turns):
        number = rng.randrange(config.files)
        if turn % config.edit_every == config.edit_every - 1:
            file = files[number]
            file[rng.randrange(len(file))] = f"    edited = check(row, {rng.randrange(1000)})"
        shown = [*(n for n in shown if n != number), number][-config.window :]
        if turn % 6 == 5:
            task = f"Sub-agent {turn}: review {len(shown)} files."
            order = rng.sample(shown, len(shown))
        else:
            task = f"Task: make {rng.choice(_NAMES)} faster. Summary of {turn} earlier steps: done."
            order = shown
        messages: Messages = [system, {"role": "user", "content": task}]
        for n in order:
            messages += [
                {"role": "assistant", "content": f"I read file {n}."},
                {"role": "user", "content": "\n".join(files[n])},
            ]
        messages.append({"role": "user", "content": f"Step {turn}: what does the last file call?"})
        yield messages


def retrieval(config: TraceConfig) -> Iterator[Messages]:
    """A front end that puts its files into one message, in another order in every turn."""
    rng = random.Random(config.seed + 1)
    files = ["\n".join(source_file(rng, config.lines)) for _ in range(config.files)]
    system = {"role": "system", "content": "Answer from the files."}
    for turn in range(config.turns):
        order = rng.sample(range(config.files), min(config.window, config.files))
        context = "\n\n".join(f"File {n}\n{files[n]}" for n in order)
        noun = rng.choice(_NOUNS)
        question = f"Turn {turn}: which function takes a {noun}?"
        yield [
            system,
            {"role": "user", "content": context},
            {"role": "user", "content": question},
        ]


def mooncake(path: Path, config: TraceConfig) -> Iterator[Messages]:
    """The first requests of a trace of JSON lines with ``hash_ids``.

    Raises InvalidOption for a file of another form."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        blocks = [[int(block) for block in row["hash_ids"]] for row in rows[: config.turns]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOption(f"{path} is no trace in Mooncake's form: {error}") from error
    system = {"role": "system", "content": "Answer from the files."}
    for number, ids in enumerate(blocks):
        texts = [_block(block, config.lines) for block in ids[: config.window]]
        messages = [system, *({"role": "user", "content": text} for text in texts)]
        yield [*messages, {"role": "user", "content": f"Request {number}: summarize it."}]


def _block(number: int, lines: int) -> str:
    return "\n".join(source_file(random.Random(number), lines))


def traces(config: TraceConfig, mooncake_path: Path | None) -> dict[str, Sequence[Messages]]:
    """All traces by name."""
    named: dict[str, Sequence[Messages]] = {
        "coding agent": [*coding_agent(config)],
        "retrieval": [*retrieval(config)],
    }
    if mooncake_path is not None:
        named["mooncake"] = [*mooncake(mooncake_path, config)]
    return named
