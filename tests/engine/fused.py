"""Engines that blend, under observation: answers, what they chose, and prompts to choose from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from looseleaf import LLM, Document, Fuse, SamplingParams
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.prompt.request import Part, PromptParts, Request
from tests.engine.harness import assert_idle, document, drawn, words, worst

PARAMS = drawn(5)
LEAD = words(1, 11)
# an exact document, one encoded alone, text between, the first once more, a short one; so near to
# each other that a window of few tokens reaches across
SEVERAL: list[Part] = [
    LEAD,
    document(1, 23),
    document(3, 19, context="alone"),
    words(3, 7),
    document(1, 23),
    document(2, 5),
    words(2, 6),
]


@dataclass(frozen=True)
class Blended:
    """An answer: its logits, and the positions of the tokens that were computed again."""

    output: RequestOutput
    logits: Tensor
    parts: PromptParts
    chosen: list[int]

    @property
    def recomputed(self) -> list[int]:
        return [document.recomputed for document in self.output.reuse.documents]


def blend(
    llm: LLM, prompt: Sequence[Part], fuse: Fuse | None, params: SamplingParams = PARAMS
) -> Blended:
    """One answer; no page is lost by it."""
    return blend_all(llm, [(prompt, fuse)], params)[0]


def blend_all(
    llm: LLM,
    asked: Sequence[tuple[Sequence[Part], Fuse | None]],
    params: SamplingParams = PARAMS,
) -> list[Blended]:
    """Answers to prompts that are asked together; pages are counted after every step."""
    engine, added = llm.engine, []
    for number, (prompt, fuse) in enumerate(asked):
        parts = engine.prompts.from_parts(prompt)
        request = Request(f"blend {engine.counters.requests} {number}", parts, params, fuse=fuse)
        added.append((parts, engine.add(request)))
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    recorder: Any = engine.runner
    answers = []
    for parts, progress in added:
        assert progress.error is None, progress.error
        logits = torch.stack(recorder.logits[progress.request.request_id, 0])
        fusion = progress.outputs[0].sequence.fusion
        chosen = fusion.chosen_positions if fusion else []
        answers.append(Blended(progress.output(), logits, parts, chosen))
    return answers


def read_as_text(prompt: Sequence[Part]) -> list[Part]:
    """The prompt with every document in the context of all before it: full prefill."""
    return [replace(p, context="prompt") if isinstance(p, Document) else p for p in prompt]


def same(mine: Blended, other: Blended) -> None:
    """The same tokens, chosen, drawn, and from the same logits up to rounding."""
    assert mine.chosen == other.chosen
    assert mine.output.token_ids == other.output.token_ids
    assert worst(mine.logits, other.logits) <= 1e-4
