"""Chat templates and tokenizers that are drawn to be hostile, and the law for them: each is served,
or refused by an error of the project, and neither takes longer than it may.

`violations` takes the call to test, so that it serves any guard around rendering and encoding."""

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from looseleaf.errors import LooseleafError

_LOOPS = (
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
_PATTERNS = ("(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){N}", "(?:a?){N}a{N}", "^(a*)*$", "([a-z]+)*=")


def templates(draw: random.Random) -> list[str]:
    """Chat templates that take too long, too much memory or too much output, or reach for Python.

    Each also writes the messages, as a template that hides its work would."""
    plain = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    sizes = [str(draw.choice((26, 40, 99))) for _ in _LOOPS]
    drawn = [loop.replace("N", size) for loop, size in zip(_LOOPS, sizes, strict=True)]
    return [draw.choice((loop, loop + plain, plain + loop)) for loop in drawn]


def tokenizers(draw: random.Random) -> list[dict[str, Any]]:
    """Descriptions of tokenizers (``tokenizer.json``) whose regular expressions explode, and whose
    normalizers grow a text."""
    patterns = [one.replace("N", str(draw.choice((12, 25, 40)))) for one in _PATTERNS]
    split = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in patterns
    ]
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * draw.choice((9, 99))}
    growing = {"type": "Sequence", "normalizers": [grow] * draw.choice((5, 9))}
    return [
        *(_tokenizer(pre_tokenizer=one) for one in split),
        *(_tokenizer(normalizer={**grow, "pattern": {"Regex": one}}) for one in patterns),
        _tokenizer(normalizer=growing),
    ]


def text(draw: random.Random) -> str:
    """A text that makes the expressions of `tokenizers` go back again and again."""
    return "a" * draw.choice((30, 60, 3000)) + draw.choice(("!", "=", "b"))


def violations(
    call: Callable[[Any], object], hostile: Iterable[Any], seconds: float
) -> list[tuple[Any, str]]:
    """The inputs whose ``call`` raised no error of the project but another one, or took longer than
    ``seconds``, and what happened. A call that never returns is for the caller to end."""
    wrong: list[tuple[Any, str]] = []
    for one in hostile:
        begun = time.monotonic()
        try:
            call(one)
        except LooseleafError:
            pass
        except Exception as error:
            wrong.append((one, repr(error)))
            continue
        if (took := time.monotonic() - begun) > seconds:
            wrong.append((one, f"{took:.1f} s"))
    return wrong


def _tokenizer(**stages: Any) -> dict[str, Any]:
    vocabulary = {chr(code): number for number, code in enumerate(range(32, 127))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model, **stages}
