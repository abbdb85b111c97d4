"""Guards of templates and tokenizers hold for a few draws, and violations of their laws count."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from looseleaf.errors import CorruptCheckpoint, InvalidRequest, LimitExceeded
from tools.fuzz_text import HostileWriter, TextFuzz, check_template, check_tokenizer, outcome


def test_draws_end_in_time_with_a_value_or_an_error_of_the_project() -> None:
    fuzz = TextFuzz(seed=4)
    fuzz(rounds=3)
    assert not fuzz.violations
    assert fuzz.ends.total() == 6


def test_a_seed_fixes_all_draws() -> None:
    def draws(seed: int) -> list[object]:
        writer = HostileWriter(seed)
        return [writer.template(), writer.conversation(), writer.tokenizer(), writer.text()]

    assert draws(1) == draws(1) != draws(2)


def test_most_drawn_tokenizers_load_and_encode(tmp_path: Path) -> None:
    writer = HostileWriter(1)
    kinds = [check_tokenizer(writer.tokenizer(), "a b", tmp_path).kind for _ in range(12)]
    assert sum("value" in kind for kind in kinds) >= 6


def test_a_plain_template_renders_the_same_in_the_sandbox() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert check_template(source, [{"role": "user", "content": "a"}]).kind == "plain, value"


def _fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: "text", "value"),
        (lambda: _fail(LimitExceeded("template", "too long")), "limit"),
        (lambda: _fail(InvalidRequest("no")), "refused"),
        (lambda: _fail(CorruptCheckpoint("no")), "refused"),
        (lambda: _fail(KeyError("form")), "violation"),
        # a panic of a Rust library is no Exception
        (lambda: _fail(BaseException("panic")), "violation"),
        (lambda: time.sleep(0.02), "violation"),
    ],
)
def test_a_foreign_error_and_a_late_end_are_violations(
    call: Callable[[], object], kind: str
) -> None:
    assert outcome(call, patience=0.01).kind == kind
