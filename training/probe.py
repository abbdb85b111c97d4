"""Questions about everyday notes that were written by hand: what a newcomer would ask.

    python -m training.probe --model FOLDER [--show]

No note of it is trained on. What went wrong on `probe.json` after a first round of training
suggested what the second should show; `probe_second.json` was written after both. An answer is
right if it ends with what the note says, word for word; it declines if it is "The documents do not
say."; anything else is wrong.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from looseleaf import LLM, Document, SamplingParams
from looseleaf.prompt.request import DocumentContext
from looseleaf_lab.evals.world import NO_ANSWER

PROBES = tuple(Path(__file__).with_name(name) for name in ("probe.json", "probe_second.json"))
RIGHT, DECLINED, WRONG = "right", "declined", "wrong"


@dataclass(frozen=True)
class Probe:
    """A question about some notes; no `answers` means that the notes do not say."""

    notes: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


def load_probes(file: Path) -> list[Probe]:
    entries = json.loads(file.read_text(encoding="utf-8"))
    return [
        Probe(tuple(entry["notes"]), question, tuple(answers or ()))
        for entry in entries
        for question, answers in entry["questions"]
    ]


def _plain(text: str) -> str:
    return " ".join(text.lower().replace('"', "").split()).rstrip(".!")


def judge(probe: Probe, reply: str) -> str:
    """Whether the reply is right, says that it does not know though the notes say, or is wrong."""
    if reply.strip() == NO_ANSWER:
        return DECLINED if probe.answers else RIGHT
    said = " " + _plain(reply)
    return RIGHT if any(said.endswith(" " + _plain(a)) for a in probe.answers) else WRONG


def ask_probes(llm: LLM, probes: Sequence[Probe], context: DocumentContext) -> list[str]:
    """The greedy replies, in order."""
    conversations = [
        [
            {
                "role": "user",
                "content": [*(Document(n, context=context) for n in probe.notes), probe.question],
            }
        ]
        for probe in probes
    ]
    params = SamplingParams(temperature=0.0, max_tokens=96)
    return [output.text for output in llm.chat(conversations, params)]


def report(probes: Sequence[Probe], replies: Sequence[str]) -> str:
    """Counts, apart for questions that the notes answer and those that they do not."""
    counts = Counter(
        (bool(probe.answers), judge(probe, reply))
        for probe, reply in zip(probes, replies, strict=True)
    )
    said = [counts[True, verdict] for verdict in (RIGHT, DECLINED, WRONG)]
    unsaid = [counts[False, verdict] for verdict in (RIGHT, WRONG)]
    return (
        f"answerable: {said[0]} right, {said[1]} declined, {said[2]} wrong of {sum(said)}; "
        f"unanswerable: {unsaid[0]} right, {unsaid[1]} wrong of {sum(unsaid)}"
    )


def print_misses(probes: Sequence[Probe], replies: Sequence[str]) -> None:
    for probe, reply in zip(probes, replies, strict=True):
        verdict = judge(probe, reply)
        if verdict != RIGHT:
            wanted = " / ".join(probe.answers) or NO_ANSWER
            print(f"  {verdict:9} {probe.question}\n{'':12}{reply}\n{'':12}wanted: {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder; without it, the one that ships")
    parser.add_argument("--show", action="store_true", help="print what was not answered rightly")
    arguments = parser.parse_args()
    llm = LLM(arguments.model)
    contexts: tuple[DocumentContext, ...] = ("lead", "prompt")
    for file in PROBES:
        probes = load_probes(file)
        for context in contexts:
            replies = ask_probes(llm, probes, context)
            print(f"{file.stem:13}{context:7}{report(probes, replies)}")
            if arguments.show:
                print_misses(probes, replies)


if __name__ == "__main__":
    main()
