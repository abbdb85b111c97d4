"""What blending is worth: exact match on held-out worlds for one policy, and what it computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looseleaf.config import Fuse
from looseleaf.engine.llm import LLM
from looseleaf.engine.request import DocumentContext
from looseleaf.evals.accuracy import ask_examples
from looseleaf.evals.world import Example, is_correct


@dataclass(frozen=True)
class Blending:
    """Right answers of one task under one policy; ``prefill`` is full attention, ``none`` plain
    reuse.

    ``recomputed`` is the share of the documents' tokens that requests computed again, in the pass
    that answers; what tells a selector which tokens to choose is not in it."""

    model: str
    task: str
    hops: int | None
    documents: int
    selector: str
    ratio: float | None
    tokens: int | None
    questions: int
    right: int
    recomputed: float

    @property
    def share(self) -> float:
        return self.right / self.questions


def measure_blending(
    llm: LLM,
    model: str,
    examples: Sequence[Example],
    fuse: Fuse | None,
    on_answer: Callable[[int], None] | None = None,
) -> Blending:
    """Accuracy on ``examples``, which are of one task; without a policy, by full attention."""
    context: DocumentContext = "prompt" if fuse is None else "lead"
    outputs = ask_examples(llm, examples, context, on_answer, fuse=fuse)
    right = sum(is_correct(e, o.text) for e, o in zip(examples, outputs, strict=True))
    recomputed = sum(o.reuse.document_tokens_recomputed for o in outputs)
    total = sum(o.reuse.document_tokens for o in outputs)
    first = examples[0]
    return Blending(
        model,
        first.task,
        first.hops if first.task == "chain" else None,
        len(first.documents),
        fuse.selector if fuse else "prefill",
        fuse.ratio if fuse else None,
        fuse.tokens if fuse else None,
        len(examples),
        right,
        recomputed / total if total else 1.0,
    )
