"""Draws hostile chat templates and tokenizers and runs them through the guards of the library.

    python -m tools.fuzz_text --minutes 1 --seed 1

Half of the draws are known attacks with random sizes, half are composed from parts at random.
Templates load and render as `ChatTemplate`, tokenizers load and encode as `Tokenizer`.

The laws: each call returns a value or raises an error of the project, within `PATIENCE` seconds.
User text never encodes to special tokens. A plain template renders in this process the same text as
in the sandbox, within a second. Violations are printed with their draw; the exit code is then 1.
A call that hangs ends the tool with a traceback."""

import argparse
import faulthandler
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidRequest, LimitExceeded, ModelError
from looseleaf.models import Tokenizer
from looseleaf.models.tokenizer.chat_template import ChatTemplate
from looseleaf.sandbox import Limits

# a render is up to ten sandbox calls of two CPU seconds; busy cores stretch them
PATIENCE = 120.0
_HANG_SECONDS = 300.0
_PLAIN_SECONDS = 1.0
_SIZES = ("26", "40", "99")
_MARKER = "<s>"
_MESSAGES = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# N is a size
_KNOWN_TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(N) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
    "{{ ns.s }}",
    "{{ '%N0000000d' % 1 }}",
    "{{ 'a' * N0000000 }}",
    "{{ 'a'.ljust(N0000000) }}",
    "{{ 'a'.zfill(N0000000) }}",
    "{{ '{:>N0000000}'.format('a') }}",
    "{{ 10 ** 10 ** N }}",
    "{{ range(N00000) | list | string }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(N) }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ messages | tojson(indent=N0000000) }}",
    "{{ ('a' * N000) | replace('a', 'b' * N0000) }}",
    "{{ lipsum(n=N0000) }}",
    "{{ '\\n' * N00000 | indent(N00000) }}",
    "{% set x = [] %}{% for i in range(N000) %}{% set _ = x.append(x) %}{% endfor %}{{ x }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('true') }}",
)
_KNOWN_REGEXES = ("(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){N}", "(?:a?){N}a{N}", "^(a*)*$")
_NAMES = (
    *("messages[0].content", "bos_token", "s", "'x'", "bos_token", "s", "messages", "m.content"),
    *("n.s", "loop.index0", "'%99999999d'", "9"),
)
_FILTERS = ("trim", "tojson", "upper", "length", "center(99999999)", "string", "default('x')")
_OPERATORS = ("~", "~", "~", "~", "~", "+", "*", "%", "**", "==", "and")
_LOOPS = ("messages", "messages[1:]", "range(99999)", "m.content", "s")
_REGEX_PARTS = ("a", "a+", "a*", "(a+)+", "(a|aa)*", "[ab]*", ".*", "$", "(?=a+b)", r"\1", "b?")
_STEPS = ("NFC", "NFKD", "Lowercase", "StripAccents")

Message = dict[str, str]


class HostileWriter:
    """Writes templates, conversations, tokenizers and texts; a seed fixes all of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def template(self) -> str:
        """A Jinja template, mostly valid; it may also write the messages."""
        if self._random.random() < 0.5:
            body = self._sized(self._random.choice(_KNOWN_TEMPLATES))
        else:
            blocks = self._random.randrange(1, 6)
            body = "".join(self._block(3) for _ in range(blocks))
            # without a namespace a template may be plain
            body = "{% set n = namespace(s='x') %}" + body if "n.s" in body else body
        return self._random.choice((body, body + _MESSAGES, _MESSAGES + body))

    def conversation(self) -> list[Message]:
        """One to four messages, with contents of up to 6,000 characters."""
        lengths = self._random.choices((0, 1, 50, 2000), k=self._random.randrange(1, 5))
        return [{"role": "user", "content": 'a"\\' * length} for length in lengths]

    def tokenizer(self) -> dict[str, Any]:
        """The content of a ``tokenizer.json``, mostly valid."""
        vocabulary = {chr(code): number for number, code in enumerate(range(32, 127))}
        marker = {
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
            "id": len(vocabulary),
            "content": _MARKER,
            "special": True,
            "normalized": self._random.random() < 0.3,
        }
        steps = [
            self._normalizer()
            for _ in range(self._random.choice((0, 0, 0, 1, 1, 1, 2, 3, 3, 9, 70)))
        ]
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        pattern = {"String": " "} if self._random.random() < 0.2 else {"Regex": self.regex()}
        return {
            "version": "1.0",
            "added_tokens": [marker],
            "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
            "pre_tokenizer": {**split, "pattern": pattern},
            "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }

    def regex(self) -> str:
        """A regular expression that may take exponential time."""
        if self._random.random() < 0.5:
            return self._sized(self._random.choice(_KNOWN_REGEXES))
        return "".join(self._random.choices(_REGEX_PARTS, k=self._random.randrange(1, 7)))

    def text(self) -> str:
        """A text on which those expressions backtrack, with the characters of a special token."""
        ends = ("!", "=", "b", _MARKER, "\uff1cs\uff1e")
        return "a" * self._random.choice((3, 60, 3000)) + self._random.choice(ends)

    def _normalizer(self) -> dict[str, Any]:
        kind = self._random.random()
        if kind < 0.3:
            return {"type": self._random.choice(_STEPS)}
        if kind < 0.4:
            return {"type": "Prepend", "prepend": "a" * self._random.choice((1, 99))}
        pattern = {"Regex": self.regex()} if kind < 0.6 else {"String": "a"}
        content = "a" * self._random.choice((0, 1, 2, 9, 99))
        return {"type": "Replace", "pattern": pattern, "content": content}

    def _sized(self, source: str) -> str:
        return source.replace("N", self._random.choice(_SIZES))

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


@dataclass
class Outcome:
    """The end of one call: ``value``, ``limit``, ``refused``, or ``violation`` of a law."""

    kind: str
    value: Any = None


def outcome(call: Callable[[], Any], patience: float = PATIENCE) -> Outcome:
    """Calls ``call``. Another error than the project's, or a late end, is a violation."""
    start = time.monotonic()
    try:
        result = Outcome("value", call())
    except LimitExceeded as error:
        result = Outcome("limit", str(error))
    except (InvalidRequest, ModelError) as error:
        result = Outcome("refused", str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # a panic of a Rust library is no Exception
        return Outcome("violation", repr(error))
    seconds = time.monotonic() - start
    return Outcome("violation", f"{seconds:.1f} s") if seconds > patience else result


def check_template(source: str, messages: list[Message]) -> Outcome:
    """Loads and renders a template; a plain one is rendered in the sandbox as well."""
    loaded = outcome(lambda: ChatTemplate(source))
    if loaded.kind != "value":
        return loaded
    template: ChatTemplate = loaded.value
    variables = {"bos_token": _MARKER}
    try:
        result = outcome(lambda: template.render(messages, **variables))
        if result.kind == "violation" or not template.is_plain:
            return result
        start = time.thread_time()
        here = outcome(lambda: template.render_once(messages, variables))
        seconds = time.thread_time() - start
        request = {"messages": messages, **variables}
        there = outcome(lambda: template.sandbox.call(request, Limits()))
        if seconds > _PLAIN_SECONDS:
            return Outcome("violation", f"a plain template took {seconds:.1f} s")
        if here != there:
            return Outcome("violation", f"a plain template: {here} here, {there} in the sandbox")
        return Outcome(f"plain, {here.kind}")
    finally:
        template.sandbox.close()


def check_tokenizer(described: dict[str, Any], text: str, folder: Path) -> Outcome:
    """Loads a tokenizer from ``folder`` and encodes ``text``."""
    (folder / "tokenizer.json").write_text(json.dumps(described))
    loaded = outcome(lambda: Tokenizer(folder))
    if loaded.kind != "value":
        return Outcome(loaded.kind if loaded.kind == "violation" else "not loaded", loaded.value)
    tokenizer: Tokenizer = loaded.value
    try:
        for call in (
            partial(tokenizer.encode, text),
            partial(tokenizer.encode_continuation, text),
            partial(tokenizer.encode, tokenizer.protect(text), special=True),
        ):
            result = outcome(call)
            if result.kind != "value":
                return result
            if not tokenizer.special_token_ids.isdisjoint(result.value):
                return Outcome("violation", "user text became a special token")
        return Outcome("value" if tokenizer.needs_sandbox else "linear, value")
    finally:
        for sandbox in tokenizer.sandboxes:
            sandbox.close()


@dataclass
class TextFuzz:
    """Rounds of one template and one tokenizer; ``ends`` counts outcomes by name."""

    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def __call__(self, rounds: int, seconds: float = float("inf")) -> None:
        """Runs ``rounds`` rounds, or for ``seconds``, whichever ends first."""
        writer, due = HostileWriter(self.seed), time.monotonic() + seconds
        with tempfile.TemporaryDirectory() as folder:
            while rounds and time.monotonic() < due:
                rounds -= 1
                template, messages = writer.template(), writer.conversation()
                self._count("template", check_template(template, messages), template)
                tokenizer, text = writer.tokenizer(), writer.text()
                result = check_tokenizer(tokenizer, text, Path(folder))
                self._count("tokenizer", result, json.dumps([tokenizer, text]))

    def _count(self, subject: str, result: Outcome, draw: str) -> None:
        self.ends[f"{subject}: {result.kind}"] += 1
        if result.kind == "violation":
            self.violations.append(f"{subject}: {result.value} | {draw}")
            print(self.violations[-1], flush=True)
        if faulthandler.is_enabled():
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)


def main() -> int:
    """Runs from the command line; returns 1 if a law was violated."""
    parser = argparse.ArgumentParser(description="hostile chat templates and tokenizers")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
    fuzz = TextFuzz(options.seed)
    fuzz(options.rounds, 60 * options.minutes)
    for name, number in sorted(fuzz.ends.items()):
        print(f"{number:6} {name}")
    return 1 if fuzz.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
