"""Random hostile templates and tokenizers: each must end in time, with a value or an error.

``python -m tools.fuzz_text --seed 1 --rounds 200``. A template renders in a sandbox. A plain
template also renders in this process, where it must give the same text within a second."""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidRequest, LimitExceeded
from looseleaf.sandbox import Limits, Sandbox
from looseleaf.sandbox.plain_templates import plain_nodes
from looseleaf.sandbox.templates import compile_template, render

LIMITS = Limits(seconds=0.3, mib=128, output=1 << 22)
# limit in seconds on a busy machine
PATIENCE = 20.0
_NAMES = (
    *("messages[0].content", "bos_token", "s", "'x'", "bos_token", "s", "messages", "m.content"),
    *("n.s", "loop.index0", "'%99999999d'", "9"),
)
_FILTERS = ("trim", "tojson", "upper", "length", "center(99999999)", "string", "default('x')")
_OPERATORS = ("~", "~", "~", "~", "~", "+", "*", "%", "**", "==", "and")
_LOOPS = ("messages", "messages[1:]", "range(99999)", "m.content", "s")
_REGEX = ("a", "a+", "a*", "(a+)+", "(a|aa)*", "[ab]*", ".*", "$", "(?=a+b)", r"\1", r"\s+", "b?")


class Writer:
    """Writes random templates and regular expressions, determined by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def template(self) -> str:
        """A Jinja template, mostly valid."""
        start = "{% set n = namespace(s='x') %}"
        return start + "".join(self._block(3) for _ in range(self._random.randrange(1, 6)))

    def regex(self) -> str:
        """A regular expression that may take exponential time."""
        return "".join(self._random.choices(_REGEX, k=self._random.randrange(1, 7)))

    def conversation(self) -> list[dict[str, str]]:
        """Up to four messages of different lengths."""
        lengths = self._random.choices((0, 1, 50, 2000), k=self._random.randrange(1, 5))
        return [{"role": "user", "content": 'a"\\' * length} for length in lengths]

    def _block(self, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.35 and depth:
            inner = "".join(self._block(depth - 1) for _ in range(2))
            return f"{{% for m in {self._random.choice(_LOOPS)} %}}{inner}{{% endfor %}}"
        if kind < 0.55:
            return f"{{% set {self._random.choice(('s', 'n.s'))} = {self._expression(2)} %}}"
        return f"{{{{ {self._expression(2)} }}}}"

    def _expression(self, depth: int) -> str:
        expression = self._random.choice(_NAMES)
        if depth and self._random.random() < 0.6:
            operator = self._random.choice(_OPERATORS)
            expression = f"({self._expression(depth - 1)} {operator} {self._expression(depth - 1)})"
        if self._random.random() < 0.3:
            expression += f" | {self._random.choice(_FILTERS)}"
        return expression


def outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    """``value``, ``limit`` or ``refused``, and the result or message of ``work``.

    Raises AssertionError if ``work`` takes too long."""
    start = time.monotonic()
    try:
        result = "value", work()
    except LimitExceeded as error:
        result = "limit", str(error)
    except (InvalidRequest, CorruptCheckpoint) as error:
        result = "refused", str(error)
    assert time.monotonic() - start < PATIENCE, "the work did not end in time"
    return result


def check_template(source: str, messages: list[dict[str, str]]) -> str:
    """The outcome of a template. Raises AssertionError if it breaks a law."""
    named = {"messages": messages, "bos_token": "<s>"}
    kind, rendering = outcome(lambda: compile_template(source))
    if kind != "value":
        return kind
    sandbox = _sandbox("templates", {"source": source}, "template")
    sandboxed = outcome(lambda: sandbox.call(named, LIMITS))
    sandbox.close()
    if plain_nodes(source) is not None:
        start = time.thread_time()
        local = outcome(lambda: render(rendering, named))
        assert time.thread_time() - start < 1, f"a plain template took long: {source}"
        assert local == sandboxed, f"a plain template differs in a sandbox: {source}"
        return f"plain {local[0]}"
    return sandboxed[0]


def check_regex(regex: str, text: str) -> str:
    """The outcome of a tokenizer with this pattern."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    try:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(regex), "isolated")
    except Exception:
        return "no pattern"
    sandbox = _sandbox("encoding", {"sources": [backend.to_str()]}, "tokenizer")
    request = {"source": 0, "markers_are_text": True, "text": text}
    kind, _ = outcome(lambda: sandbox.call(request, LIMITS))
    sandbox.close()
    return kind


def _sandbox(job: str, setup: dict[str, Any], what: str) -> Sandbox:
    return Sandbox(job, lambda: setup, what=what, subject=f"the {what}", advice="shorten it")


def run(seed: int, rounds: int) -> dict[str, int]:
    """The number of templates and tokenizers by outcome."""
    writer, counts = Writer(seed), dict[str, int]()
    for _ in range(rounds):
        template = check_template(writer.template(), writer.conversation())
        tokenizer = check_regex(writer.regex(), "a" * 200 + "!")
        for name in (f"template: {template}", f"tokenizer: {tokenizer}"):
            counts[name] = counts.get(name, 0) + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    for name, number in sorted(run(options.seed, options.rounds).items()):
        print(f"{number:6} {name}")


if __name__ == "__main__":
    main()
