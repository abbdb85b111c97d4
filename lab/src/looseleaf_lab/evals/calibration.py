"""Calibration of fuse policies: their distance from full prefill on given documents and questions,
and the cheapest policy whose answers agree often enough."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from looseleaf.config import Fuse
from looseleaf.errors import InvalidRequest
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, PromptParts
from looseleaf_lab.evals.probe import Probed, divergence, probe

TRIED_RATIO = 0.15
"""The ratio at which layer settings are compared, before ratios."""


@dataclass(frozen=True)
class CalibrationRow:
    """One policy against full prefill, over ``questions``.

    ``agreement`` is the share of greedy answers with equal tokens. ``kl`` is the divergence of
    next-token distributions in nats, over positions with an equal prefix. ``text_deviation`` is the
    relative change of the question's own values over all layers, a measure of wrong attention to
    the documents. ``deviation_left`` is the share of the documents' true deviation at tokens that
    were not recomputed. ``cost`` is the computation for the documents, scoring included, as a share
    of their full prefill."""

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
class _Case:
    """A question with both forms of its prompt, its full prefill and the true deviations."""

    full: Probed
    parts: PromptParts
    num_text: int
    truth: Probed


class Calibration:
    """Fuse policies over one model, some documents and questions.

    Every prompt has all documents; their order rotates with the questions, so that the first
    document changes. Raises InvalidRequest for fewer than two documents or without a question."""

    def __init__(
        self, llm: LLM, name: str, documents: Sequence[Document], questions: Sequence[str]
    ) -> None:
        if len(documents) < 2:
            raise InvalidRequest(
                "calibration compares documents of one prompt: give two or more, not "
                f"{len(documents)}"
            )
        if not questions:
            raise InvalidRequest("calibration compares answers: give a question")
        self.llm, self.name, self.max_tokens = llm, name, 64
        self.num_layers = llm.engine.runner.model.config.num_layers
        self._cases = [self._case(documents, n, text) for n, text in enumerate(questions)]

    def measure(self, fuse: Fuse) -> CalibrationRow:
        """One policy over all questions."""
        results = [self._compare(case, fuse) for case in self._cases]
        means = [sum(column) / len(column) for column in zip(*results, strict=True)]
        settings = fuse.settings()
        return CalibrationRow(
            self.name,
            fuse.selector,
            settings.get("ratio", ""),
            settings.get("tokens", ""),
            settings.get("watched_share", ""),
            " ".join(map(str, settings.get("check_layers", ()))),
            len(results),
            *means,
        )

    def sweep(
        self,
        selectors: Sequence[str],
        ratios: Sequence[float],
        on_row: Callable[[CalibrationRow], None] = lambda row: None,
    ) -> list[tuple[Fuse, CalibrationRow]]:
        """Rows of plain reuse, then of every selector: its layer settings, then every ratio at the
        best one."""
        rows = []

        def measure(fuse: Fuse) -> CalibrationRow:
            row = self.measure(fuse)
            rows.append((fuse, row))
            on_row(row)
            return row

        measure(Fuse("none"))
        for selector in selectors:
            choices = list(self._layer_choices(selector))
            best = choices[0]
            if len(choices) > 1:
                best = min(choices, key=lambda fuse: _rank(measure(fuse)))
            for ratio in ratios:
                fuse = replace(best, ratio=ratio)
                if fuse not in [measured for measured, _ in rows]:
                    measure(fuse)
        return rows

    def _layer_choices(self, selector: str) -> Iterator[Fuse]:
        settings = {"selector": selector, "ratio": TRIED_RATIO}
        if selector in ("question", "links"):
            last = 1 / self.num_layers
            shares = sorted({share for share in (last, 0.25, 0.5, 1.0) if share >= last})
            yield from (Fuse(**settings, watched_share=share) for share in shares)  # type: ignore[arg-type]
        elif selector == "deviation":
            layers = sorted({1, 2, max(1, self.num_layers // 4), max(1, self.num_layers // 2)})
            yield from (
                Fuse(**settings, check_layers=(layer,))  # type: ignore[arg-type]
                for layer in layers
                if layer < self.num_layers
            )
        else:
            yield Fuse(**settings)  # type: ignore[arg-type]

    def _case(self, documents: Sequence[Document], number: int, text: str) -> _Case:
        rotation = number % len(documents)
        order = [*documents[rotation:], *documents[:rotation]]
        full = [replace(document, context="prompt") for document in order]
        parts, full_parts = self._parts(order, text), self._parts(full, text)
        num_text = len(parts[-1].tokens)
        engine = self.llm.engine
        return _Case(
            probe(engine, full_parts, None, num_text, self.max_tokens),
            parts,
            num_text,
            probe(engine, parts, Fuse("oracle", ratio=0.0), num_text, 1),
        )

    def _parts(self, documents: Sequence[Document], text: str) -> PromptParts:
        prompts = self.llm.engine.prompts
        if self.llm.engine.tokenizer.has_chat_template:
            return prompts.from_messages([{"role": "user", "content": [*documents, text]}])
        return prompts.from_parts([*documents, text])

    def _compare(self, case: _Case, fuse: Fuse) -> tuple[float, ...]:
        blended = probe(self.llm.engine, case.parts, fuse, case.num_text, self.max_tokens)
        full, oracle = case.full, case.truth
        prefix_length = 0
        for blended_token, full_token in zip(blended.token_ids, full.token_ids, strict=False):
            if blended_token != full_token:
                break
            prefix_length += 1
        scores = dict(zip(oracle.candidates, oracle.scores, strict=True))
        recovered = sum(scores.get(position, 0.0) for position in blended.positions)
        documents = max(1, blended.reuse.document_tokens)
        recomputed = blended.reuse.document_tokens_recomputed / documents
        change = (blended.values - full.values).flatten(2).norm(dim=-1)
        return (
            float(blended.token_ids == full.token_ids),
            divergence(full.logprobs[: prefix_length + 1], blended.logprobs[: prefix_length + 1]),
            float((change / full.values.flatten(2).norm(dim=-1).clamp_min(1e-9)).mean()),
            1 - recovered / max(1e-9, sum(scores.values())),
            recomputed,
            recomputed + self._scoring_cost(fuse, case, documents, recomputed),
        )

    def _scoring_cost(self, fuse: Fuse, case: _Case, documents: int, recomputed: float) -> float:
        """The cost of the passes that select tokens: rows times layers, over the documents'."""
        share = len(case.truth.candidates) / documents
        if fuse.selector == "deviation":
            return max(0.0, share - recomputed) * fuse.check_layers[0] / self.num_layers
        if fuse.selector == "question":
            return case.num_text / documents
        if fuse.selector == "links":
            # the budget includes the scout tokens
            return case.num_text / documents + max(0.0, (fuse.ratio or 0.0) * share - recomputed)
        return 0.0


def _rank(row: CalibrationRow) -> tuple[float, float, float]:
    """Sort key of layer settings: agreement, then cost if all answers agree (a late check layer
    computes all tokens in the layers below it), then divergence."""
    return (-row.agreement, round(row.cost, 3) if row.agreement == 1 else 0.0, row.kl)


def propose(
    rows: Sequence[tuple[Fuse, CalibrationRow]], tolerance: float
) -> tuple[Fuse, CalibrationRow] | None:
    """The cheapest policy that disagrees in at most ``tolerance`` of the questions; ties go to the
    least divergence. None if no policy qualifies."""
    eligible = [pair for pair in rows if pair[1].agreement >= 1 - tolerance - 1e-9]
    return min(eligible, key=lambda pair: (pair[1].cost, pair[1].kl), default=None)
