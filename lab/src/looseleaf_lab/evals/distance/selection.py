"""Selection of keys against dense decoding: loss and KL of right answers, token by token.

Every answer token is predicted by a decode row, which reads the keys that the policy selects. The
prompt itself is computed densely, and shared by all arms through the prefix cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from looseleaf.config import Select
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, PromptParts
from looseleaf.sparse import make_policy
from looseleaf_lab.evals.distance.forced import decoded_distributions
from looseleaf_lab.evals.distance.logits import Prepare, divergence, likelihood
from looseleaf_lab.evals.distance.overlap import Losses, OverlapPolicy, watch
from looseleaf_lab.evals.distance.summary import paired_mean
from looseleaf_lab.evals.run import AnswerFile
from looseleaf_lab.evals.task import Answer, Item

BOUND = 0.05
"""Largest difference of the loss from dense decoding, in nats per token."""


@dataclass(frozen=True)
class SelectionRow:
    """One policy of one model over the questions of ``file``. Intervals are 95 %, over questions.

    ``nll`` is the loss of the right answer minus that of dense decoding, ``kl`` the divergence
    from it, both in nats per token. ``worst`` is the largest ``nll`` of a question. ``pages_read``
    is the share of pages that the layers read which select."""

    model: str
    file: str
    arm: str
    device: str
    questions: int
    tokens: float
    pages_read: float
    nll: float
    nll_low: float
    nll_high: float
    worst: float
    kl: float
    kl_low: float
    kl_high: float

    @property
    def is_near(self) -> bool:
        """Whether the loss is within `BOUND` of dense decoding."""
        return abs(self.nll) <= BOUND


class _Figures(NamedTuple):
    tokens: float
    pages_read: float
    nll: float
    kl: float


class SelectionMeter:
    """Measures selections over one model. ``source`` identifies code and model in the file of
    ``answers``, which has the figures of every question."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        answers: AnswerFile | None = None,
        source: tuple[str, ...] = (),
    ) -> None:
        self.llm, self.name, self._count = llm, name, 0
        # an empty file is false
        self.answers, self.source = AnswerFile() if answers is None else answers, source

    def measure(
        self,
        file: str,
        items: Sequence[Item],
        selects: Sequence[Select],
        on_count: Callable[[int], None] = lambda count: None,
    ) -> list[SelectionRow]:
        """A row per policy, in order. Raises the errors of the engine."""
        figures: list[list[_Figures]] = [[] for _ in selects]
        for number, item in enumerate(items, 1):
            prompt = item.fingerprint()
            names = [(*self.source, file, repr(s), item.key, prompt) for s in selects]
            missing = [n for n, name in enumerate(names) if self.answers.find(name) is None]
            distances = self._distances(item, [selects[n] for n in missing])
            fresh = [Answer("", distance._asdict()) for distance in distances]
            self.answers.keep([names[n] for n in missing], fresh)
            for own, name in zip(figures, names, strict=True):
                answer = self.answers.find(name)
                assert answer is not None, "every policy is measured"
                own.append(_Figures(**answer.report))
            on_count(number)
        pairs = zip(selects, figures, strict=True)
        return [self._row(file, str(select), own) for select, own in pairs]

    def losses(self, items: Sequence[Item], select: Select) -> Losses:
        """The attention that layers lose by choices of others, over the answers of ``items``."""
        engine = self.llm.engine
        base = make_policy(select, engine.runner.pool.page_size)
        assert base is not None, "the policy chooses pages"
        policy = OverlapPolicy(base, engine.runner.model.config.num_layers)
        for item in items:
            parts = self._parts(item)
            _, answer = engine.prompts.continued(parts, item.answers[0])
            self._rows(parts, answer, select, lambda sequence: watch(sequence, policy))
        return policy.losses()

    def _distances(self, item: Item, selects: Sequence[Select]) -> list[_Figures]:
        if not selects:
            return []
        parts = self._parts(item)
        _, answer = self.llm.engine.prompts.continued(parts, item.answers[0])
        dense, _ = self._rows(parts, answer, None)
        loss, results = likelihood(dense, answer), []
        tokens = sum(len(part.tokens) for part in parts)
        for select in selects:
            rows, progress = self._rows(parts, answer, select)
            report = progress.output().select
            read = report.pages_read / report.pages_held if report and report.pages_held else 1.0
            nll = loss - likelihood(rows, answer)
            results.append(_Figures(tokens, read, nll, divergence(dense, rows)))
        return results

    def _rows(
        self,
        parts: PromptParts,
        answer: Sequence[int],
        select: Select | None,
        prepare: Prepare = lambda sequence: None,
    ) -> Any:
        self._count += 1
        name = f"(selection {self._count})"
        return decoded_distributions(self.llm.engine, name, parts, answer, select, prepare)

    def _parts(self, item: Item) -> PromptParts:
        documents = [Document(text, context="prompt") for text in item.documents]
        prompts, before = self.llm.engine.prompts, [item.before] if item.before else []
        content = [*before, *documents, item.question]
        if self.llm.engine.tokenizer.has_chat_template:
            return prompts.from_messages([{"role": "user", "content": content}])
        question = f"\nQuestion: {item.question}\nAnswer:"
        return prompts.from_parts([*before, *documents, question])

    def _row(self, file: str, arm: str, figures: Sequence[_Figures]) -> SelectionRow:
        count = len(figures)

        def mean(values: Sequence[float]) -> float:
            return sum(values) / count

        losses, divergences = [f.nll for f in figures], [f.kl for f in figures]
        return SelectionRow(
            self.name,
            file,
            arm,
            str(self.llm.engine.runner.model.device),
            count,
            mean([f.tokens for f in figures]),
            mean([f.pages_read for f in figures]),
            mean(losses),
            *paired_mean(losses),
            max(losses),
            mean(divergences),
            *paired_mean(divergences),
        )


def smallest_budgets(rows: Sequence[tuple[Select, SelectionRow]]) -> dict[str, str]:
    """By policy, the arm with the least read pages that is near dense decoding in every file, or
    an empty text."""
    near: dict[str, dict[str, list[SelectionRow]]] = {}
    for select, row in rows:
        near.setdefault(select.policy, {}).setdefault(row.arm, []).append(row)
    smallest = {}
    for policy, arms in near.items():
        fitting = {arm: own for arm, own in arms.items() if all(row.is_near for row in own)}
        smallest[policy] = min(
            fitting, key=lambda arm: sum(row.pages_read for row in fitting[arm]), default=""
        )
    return smallest
