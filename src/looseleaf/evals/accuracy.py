"""Exact match on held-out worlds, by the public API only: the figures of the model card.

Two ways of reading the same tokens: ``prompt``, where each document sees all before it (full
attention), and ``lead``, where each is encoded by itself and reused (plain reuse)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looseleaf.config import Fuse
from looseleaf.engine.llm import LLM
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.request import Document, DocumentContext
from looseleaf.evals.world import Example, is_correct, make_example
from looseleaf.sampling_params import SamplingParams


@dataclass(frozen=True)
class Accuracy:
    """Right answers of one task under one document context, with a 95 % Wilson interval."""

    model: str
    task: str
    hops: int | None
    context: str
    documents: int
    questions: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the share that the sample leaves open."""
        z, n, p = 1.96, self.questions, self.share
        center = (p + z * z / (2 * n)) / (1 + z * z / n)
        margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, center - margin), min(1.0, center + margin)


def ask_examples(
    llm: LLM,
    examples: Sequence[Example],
    context: DocumentContext,
    on_answer: Callable[[int], None] | None = None,
    batch: int = 16,
    fuse: Fuse | None = None,
) -> list[RequestOutput]:
    """The model's greedy answers, in chat form, ``batch`` questions at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=96)
    answers: list[RequestOutput] = []
    for start in range(0, len(examples), batch):
        conversations = [
            [
                {
                    "role": "user",
                    "content": [*(Document(d, context=context) for d in e.documents), e.question],
                }
            ]
            for e in examples[start : start + batch]
        ]
        answers += llm.chat(conversations, params, fuse=fuse)
        if on_answer is not None:
            on_answer(len(answers))
    return answers


def measure(
    llm: LLM,
    model: str,
    task: str,
    *,
    hops: int | None,
    context: DocumentContext,
    seeds: range,
    num_documents: int = 6,
    on_answer: Callable[[int], None] | None = None,
) -> Accuracy:
    """Accuracy of one task, one question for each of the held-out worlds ``seeds``."""
    examples = [make_example(task, seed, num_documents=num_documents, hops=hops) for seed in seeds]
    answers = ask_examples(llm, examples, context, on_answer)
    right = sum(is_correct(e, answer.text) for e, answer in zip(examples, answers, strict=True))
    return Accuracy(model, task, hops, context, num_documents, len(seeds), right)
