"""How near each fuse policy comes to full prefill on given documents and questions, and which one
to take: the cheapest whose answers agree often enough."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from looseleaf.config import Fuse
from looseleaf.errors import InvalidRequest
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, PromptParts
from looseleaf_lab.evals.probe import Probed, divergence, probe

TRIED_RATIO = 0.15
"""The budget at which layers are compared, before ratios are."""


@dataclass(frozen=True)
class Calibrated:
    """One policy against full prefill, over ``questions``.

    ``agreement`` is the share of greedy answers that are the same, token by token. ``kl`` is the
    divergence of next-token distributions in nats, over positions whose prefix is still the same.
    ``text_deviation`` is the relative change of the question's own values over all layers: what
    attention to the documents got wrong on the way. ``deviation_left`` is the share of the
    documents' true deviation that stands at tokens not computed again. ``cost`` is what was
    computed of the documents besides, evidence included, as a share of their full prefill."""

    model: str
    selector: str
    ratio: float | str
    tokens: int | str
    watched_share: float | str
    check_layers: str
    questions: int
    agreement: float
    kl: float
    text_deviation: float
    deviation_left: float
    recomputed: float
    cost: float


@dataclass(frozen=True)
class _Question:
    """A question with its documents, both ways, and what full prefill says."""

    full: Probed
    parts: PromptParts
    num_text: int
    truth: Probed


class Calibration:
    """Policies over one model, some documents and questions.

    Every prompt holds all documents, in an order that turns with the questions, so that another
    document stands first each time. Raises InvalidRequest unless there are two documents and a
    question."""

    def __init__(
        self, llm: LLM, name: str, documents: Sequence[Document], questions: Sequence[str]
    ) -> None:
        if len(documents) < 2:
            raise InvalidRequest(
                "calibration compares documents that one prompt holds: give two or more, not "
                f"{len(documents)}"
            )
        if not questions:
            raise InvalidRequest("calibration compares answers: give a question")
        self.llm, self.name, self.max_tokens = llm, name, 64
        self.num_layers = llm.engine.runner.model.config.num_layers
        self._asked = [self._ask(documents, n, text) for n, text in enumerate(questions)]

    def measure(self, fuse: Fuse) -> Calibrated:
        """One policy over all questions."""
        found = [self._compare(one, fuse) for one in self._asked]
        means = [sum(column) / len(column) for column in zip(*found, strict=True)]
        told = fuse.settings()
        return Calibrated(
            self.name,
            fuse.selector,
            told.get("ratio", ""),
            told.get("tokens", ""),
            told.get("watched_share", ""),
            " ".join(map(str, told.get("check_layers", ()))),
            len(found),
            *means,
        )

    def sweep(
        self,
        selectors: Sequence[str],
        ratios: Sequence[float],
        on_row: Callable[[Calibrated], None] = lambda row: None,
    ) -> list[tuple[Fuse, Calibrated]]:
        """Plain reuse, then every selector: first which layers it should look at, then every
        ratio."""
        rows = []

        def take(fuse: Fuse) -> Calibrated:
            row = self.measure(fuse)
            rows.append((fuse, row))
            on_row(row)
            return row

        take(Fuse("none"))
        for selector in selectors:
            choices = list(self._layer_choices(selector))
            best = choices[0]
            if len(choices) > 1:
                best = min(choices, key=lambda fuse: _worth(take(fuse)))
            for ratio in ratios:
                fuse = replace(best, ratio=ratio)
                if fuse not in [known for known, _ in rows]:
                    take(fuse)
        return rows

    def _layer_choices(self, selector: str) -> Iterator[Fuse]:
        at = {"selector": selector, "ratio": TRIED_RATIO}
        if selector in ("question", "links"):
            last = 1 / self.num_layers
            shares = sorted({share for share in (last, 0.25, 0.5, 1.0) if share >= last})
            yield from (Fuse(**at, watched_share=share) for share in shares)  # type: ignore[arg-type]
        elif selector == "deviation":
            layers = sorted({1, 2, max(1, self.num_layers // 4), max(1, self.num_layers // 2)})
            yield from (
                Fuse(**at, check_layers=(layer,))  # type: ignore[arg-type]
                for layer in layers
                if layer < self.num_layers
            )
        else:
            yield Fuse(**at)  # type: ignore[arg-type]

    def _ask(self, documents: Sequence[Document], number: int, text: str) -> _Question:
        turn = number % len(documents)
        order = [*documents[turn:], *documents[:turn]]
        full = [replace(document, context="prompt") for document in order]
        parts, whole = self._parts(order, text), self._parts(full, text)
        num_text = len(parts[-1].tokens)
        engine = self.llm.engine
        return _Question(
            probe(engine, whole, None, num_text, self.max_tokens),
            parts,
            num_text,
            probe(engine, parts, Fuse("oracle", ratio=0.0), num_text, 1),
        )

    def _parts(self, documents: Sequence[Document], text: str) -> PromptParts:
        prompts = self.llm.engine.prompts
        if self.llm.engine.tokenizer.has_chat_template:
            return prompts.from_messages([{"role": "user", "content": [*documents, text]}])
        return prompts.from_parts([*documents, text])

    def _compare(self, asked: _Question, fuse: Fuse) -> tuple[float, ...]:
        mine = probe(self.llm.engine, asked.parts, fuse, asked.num_text, self.max_tokens)
        full, truth = asked.full, asked.truth
        same = 0
        for one, other in zip(mine.token_ids, full.token_ids, strict=False):
            if one != other:
                break
            same += 1
        scores = dict(zip(truth.candidates, truth.scores, strict=True))
        mended = sum(scores.get(at, 0.0) for at in mine.positions)
        documents = max(1, mine.reuse.document_tokens)
        recomputed = mine.reuse.document_tokens_recomputed / documents
        change = (mine.values - full.values).flatten(2).norm(dim=-1)
        return (
            float(mine.token_ids == full.token_ids),
            divergence(full.logprobs[: same + 1], mine.logprobs[: same + 1]),
            float((change / full.values.flatten(2).norm(dim=-1).clamp_min(1e-9)).mean()),
            1 - mended / max(1e-9, sum(scores.values())),
            recomputed,
            recomputed + self._evidence(fuse, asked, documents, recomputed),
        )

    def _evidence(self, fuse: Fuse, asked: _Question, documents: int, recomputed: float) -> float:
        """Rows times layers of the passes that told which tokens to compute again."""
        share = len(asked.truth.candidates) / documents
        if fuse.selector == "deviation":
            return max(0.0, share - recomputed) * fuse.check_layers[0] / self.num_layers
        if fuse.selector == "question":
            return asked.num_text / documents
        if fuse.selector == "links":
            # scouts are paid for out of the budget
            return asked.num_text / documents + max(0.0, (fuse.ratio or 0.0) * share - recomputed)
        return 0.0


def _worth(row: Calibrated) -> tuple[float, float, float]:
    """Where all answers agree, layers are told apart by what they cost (a late check layer lets
    every token pass those below it); before that, by how near the distributions are."""
    return (-row.agreement, round(row.cost, 3) if row.agreement == 1 else 0.0, row.kl)


def propose(
    rows: Sequence[tuple[Fuse, Calibrated]], tolerance: float
) -> tuple[Fuse, Calibrated] | None:
    """The cheapest policy whose answers disagree in at most ``tolerance`` of the questions; of
    equally cheap ones that with the least divergence. None if there is none."""
    fit = [pair for pair in rows if pair[1].agreement >= 1 - tolerance - 1e-9]
    return min(fit, key=lambda pair: (pair[1].cost, pair[1].kl), default=None)
