"""One question under one arm: its first token, its greedy answer, and distances from full prefill.

``nll`` is minus the mean log-probability of the right answer's tokens. ``kl`` compares
distributions at the right answer's tokens, ``kl_answer`` at the tokens of full prefill's own greedy
answer. Both are teacher-forced. ``agrees`` is whether the first tokens of the greedy answer equal
those of full prefill. ``choice`` is the index of the likeliest candidate by mean log-probability;
candidate 0 is right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from jaxtyping import Float
from torch import Tensor

from looseleaf.llm.llm import LLM
from looseleaf.prompt.primer import RequestDefaults, primer_tokens
from looseleaf.prompt.request import Document, DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.evals.arms import Form
from looseleaf_lab.evals.distance.arms import DistanceArm
from looseleaf_lab.evals.distance.ceiling import Ceiling, Scores, ceiling_scores, give_tokens
from looseleaf_lab.evals.distance.logits import (
    Prepare,
    distributions,
    divergence,
    likelihood,
    run,
)
from looseleaf_lab.evals.scores import word_f1
from looseleaf_lab.evals.task import Answer, Item

AGREEING_TOKENS = 12
"""Tokens of two greedy answers that are compared."""


@dataclass(frozen=True)
class Reference:
    """Full prefill's view of a question: its greedy tokens, its choice, and its distributions at
    the right answer and at its own."""

    token_ids: tuple[int, ...]
    choice: int
    gold: Float[Tensor, "gold vocab_size"]
    own: Float[Tensor, "own vocab_size"]


class DistanceMeter:
    """Measures arms over one model. ``max_tokens`` is the length of a greedy answer, ``primer`` are
    the texts of primed arms."""

    def __init__(
        self, llm: LLM, form: Form, max_tokens: int = 24, primer: Sequence[str] = ()
    ) -> None:
        self.llm, self.form, self.max_tokens = llm, form, max_tokens
        tokens = primer_tokens(llm.engine.tokenizer, primer)
        self._defaults = RequestDefaults(None, tokens, llm.engine.max_model_len)
        self._numbers = count()
        self._known: tuple[str, Mapping[Ceiling, Scores]] = ("", {})

    def measure(
        self, item: Item, candidates: Sequence[str], arm: DistanceArm, reference: Reference | None
    ) -> tuple[Answer, Reference]:
        """The answer with its figures, and the reference, which is full prefill's own if None.

        The first of ``candidates`` is right. A single one is no choice. Without candidates full
        prefill's own greedy answer is right. Raises the errors of the engine."""
        salt = f"{arm.name} {item.key} {next(self._numbers)}" if arm.context == "prompt" else ""
        parts = self._parts(item, arm)
        self._prepare(item, arm, parts, salt)
        give = self._giver(item, parts, arm)
        (progress,) = run(self.llm.engine, [self._greedy(parts, arm, salt)], give)
        output = progress.output()
        token_ids = output.token_ids
        own = token_ids[:AGREEING_TOKENS] if reference is None else reference.token_ids
        requests, answers = self._scored(parts, [*candidates, own], arm, salt)
        rows = distributions(self.llm.engine, requests, give)
        means = [likelihood(row, ids) for row, ids in zip(rows, answers, strict=True)]
        choice = max(range(len(candidates)), key=means.__getitem__, default=0)
        if reference is None:
            reference = Reference(own, choice, rows[0], rows[-1])
        first = output.metrics.first_token
        assert first is not None, "a greedy answer has a token"
        figures = {
            "nll": -means[0],
            "kl": divergence(reference.gold, rows[0]),
            "kl_answer": divergence(reference.own, rows[-1]),
            "agrees": float(token_ids[:AGREEING_TOKENS] == reference.token_ids),
            "f1": word_f1(output.text.strip(), item.answers) if item.answers else 0.0,
            "first_token": first,
            "document_tokens": float(sum(p.num_tokens for p in output.reuse.documents)),
            "recomputed": float(output.reuse.document_tokens_recomputed),
        }
        if len(candidates) > 1:
            figures |= {
                "choice": float(choice),
                "same_choice": float(choice == reference.choice),
            }
        return Answer(output.text, figures), reference

    def _giver(self, item: Item, parts: PromptParts, arm: DistanceArm) -> Prepare:
        """Gives a sequence the tokens of the arm's ceiling, if it has one."""
        if arm.ceiling is None:
            return lambda sequence: None
        if self._known[0] != item.fingerprint():
            self._known = item.fingerprint(), ceiling_scores(self.llm.engine.runner.model, parts)
        scores = self._known[1][arm.ceiling]
        return lambda sequence: give_tokens(sequence, scores)

    def _parts(self, item: Item, arm: DistanceArm) -> PromptParts:
        parts = self._plain_parts(item, arm)
        return self._defaults.primed(parts) if arm.primed else parts

    def _plain_parts(self, item: Item, arm: DistanceArm) -> PromptParts:
        texts = item.documents if arm.has_documents else ()
        documents = [Document(text, context=arm.context) for text in texts]
        prompts, before = self.llm.engine.prompts, [item.before] if item.before else []
        if self.form == "chat":
            content = [*before, *documents, item.question]
            return prompts.from_messages([{"role": "user", "content": content}])
        return prompts.from_parts([*before, *documents, f"\nQuestion: {item.question}\nAnswer:"])

    def _prepare(self, item: Item, arm: DistanceArm, parts: PromptParts, salt: str) -> None:
        """Compute what the arm finds in the cache: its documents, or the first one as a prefix."""
        engine = self.llm.engine
        if arm.primes:
            other = replace(item, documents=item.documents[:1], question="What else?")
            run(engine, [self._greedy(self._parts(other, arm), arm, salt, max_tokens=1)])
        elif any(isinstance(part, DocumentPart) for part in parts):
            progress = engine.warm((*parts[:-1], TextPart(())))
            while not progress.finished:
                engine.step()
            if progress.error is not None:
                raise progress.error

    def _greedy(
        self, parts: PromptParts, arm: DistanceArm, salt: str, max_tokens: int | None = None
    ) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens or self.max_tokens)
        return Request(self._name(), parts, params, salt, fuse=arm.fuse)

    def _scored(
        self,
        parts: PromptParts,
        answers: Sequence[str | tuple[int, ...]],
        arm: DistanceArm,
        salt: str,
    ) -> tuple[list[Request], list[tuple[int, ...]]]:
        """Requests that score each answer after the prompt, and the tokens of the answers."""
        prompts = self.llm.engine.prompts
        first = sum(len(part.tokens) for part in parts)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=first)
        requests, tokens = [], []
        for answer in answers:
            text = f" {answer}" if isinstance(answer, str) and self.form == "bare" else answer
            whole, ids = prompts.continued(parts, text)
            request = Request(self._name(), whole, params, salt, fuse=arm.fuse, num_given=len(ids))
            requests.append(request)
            tokens.append(ids)
        return requests, tokens

    def _name(self) -> str:
        return f"(distance {next(self._numbers)})"


def candidates_of(items: Sequence[Item], number: int, total: int = 4) -> list[str]:
    """Answers to choose from: the right one, then those of the following other questions.

    Empty for a question without a right answer."""
    if not items[number].answers:
        return []
    right = items[number].answers[0]
    entries = [items[(number + n) % len(items)] for n in range(1, len(items))]
    further = [item.answers[0] for item in entries if item.answers]
    distinct = [text for text in dict.fromkeys(further) if text != right]
    return [right, *distinct[: total - 1]]
