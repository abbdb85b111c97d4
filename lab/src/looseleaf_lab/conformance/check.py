"""The laws, each with its number, sentence and check."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from looseleaf.errors import LooseleafError
from looseleaf_lab.conformance import reference
from looseleaf_lab.conformance.answers import (
    Answers,
    answers_at_offsets,
    blending,
    independence,
    selection,
    sharing_of_answers,
)
from looseleaf_lab.conformance.operators import (
    merge_equals_concatenation,
    segments_at_offsets,
    selection_of_rows,
    sharing_of_rows,
)
from looseleaf_lab.conformance.tiers import from_tiers, lost_documents
from looseleaf_lab.conformance.verdict import Finding, LawVerdict
from looseleaf_lab.errors import INSTALL


class Skipped(LooseleafError):
    """A law that does not apply here; the message is the reason."""


@dataclass(frozen=True)
class Law:
    """A law of the design and its check."""

    number: int
    sentence: str
    check: Callable[[Answers], list[Finding]]


def check_laws(
    answers: Answers, numbers: tuple[int, ...] = (), on_law: Callable[[Law], None] | None = None
) -> tuple[LawVerdict, ...]:
    """The verdicts on every law, or on the laws ``numbers``; ``on_law`` is called before each.

    An exception during a check fails its law, and the verdict names the error."""
    verdicts = []
    for law in LAWS:
        if numbers and law.number not in numbers:
            continue
        if on_law is not None:
            on_law(law)
        verdicts.append(_judge(law, answers))
    return tuple(verdicts)


def _judge(law: Law, answers: Answers) -> LawVerdict:
    start = time.perf_counter()
    findings: tuple[Finding, ...] = ()
    reason = ""
    try:
        findings = tuple(law.check(answers))
        status = "passed" if all(finding.holds for finding in findings) else "failed"
    except Skipped as skip:
        status, reason = "skipped", str(skip)
    except Exception as error:
        status, reason = "failed", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return LawVerdict(law.number, law.sentence, status, findings, reason, seconds)  # type: ignore[arg-type]


def _segments(answers: Answers) -> list[Finding]:
    return [*segments_at_offsets(answers.subject), *answers_at_offsets(answers)]


def _sharing(answers: Answers) -> list[Finding]:
    of_rows, rows_shared = sharing_of_rows(answers.subject)
    of_answers, answers_shared = sharing_of_answers(answers)
    if not (rows_shared or answers_shared):
        raise Skipped(
            "the cost model of this device read no rows together at this length: raise --tokens"
        )
    return [*of_rows, *of_answers]


def _transformers(answers: Answers) -> list[Finding]:
    if not reference.available():
        raise Skipped(f"Transformers is not installed: {INSTALL}")
    if answers.subject.stored_in is not None:
        raise Skipped("keys and values of eight bits are an approximation: leave kv_dtype out")
    return reference.agrees_with_transformers(answers.subject)


LAWS = (
    Law(
        1,
        "A merge of states equals attention over the concatenated keys; the empty state is "
        "the unit.",
        lambda answers: merge_equals_concatenation(answers.subject),
    ),
    Law(
        2,
        "A segment read at Δ equals the same tokens encoded at Δ with the same visibility.",
        _segments,
    ),
    Law(3, "Sharing changes nothing: grouped and ungrouped plans give the same output.", _sharing),
    Law(
        4,
        "Blend at ratio 1 equals full prefill; at ratio 0 it equals plain reuse; a recomputed row "
        "never depends on a later key.",
        blending,
    ),
    Law(
        5,
        "Selection with a full budget equals dense decode; revision of one row equals its base "
        "policy.",
        lambda answers: [*selection_of_rows(answers.subject), *selection(answers)],
    ),
    Law(
        6,
        "Output does not depend on cache history, on batch mates, or on the tier a segment came "
        "from.",
        lambda answers: [*independence(answers), *from_tiers(answers)],
    ),
    Law(
        7,
        "A segment that cannot be loaded (missing, cut short, corrupt) is recomputed; the request "
        "never fails for it, and a counter says so.",
        lost_documents,
    ),
    Law(
        8,
        "Logits agree with Hugging Face Transformers when nothing is approximated.",
        _transformers,
    ),
)
