"""Calibration of a model: the primer and blending policy with the least KL at a wanted speed.

Plain reuse and selectors, with each of the layers that they may read, are compared at one share,
without and with a primer. The two with the least KL are then tried at every share. Even questions
choose the policy, odd ones measure it. The ceiling of a share is the KL of tokens chosen with full
knowledge, so a goal beyond it is out of reach of any choice of tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from looseleaf.config import Fuse, ModelConfig
from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.distance.arms import (
    FULL,
    REUSE,
    SHARE,
    DistanceArm,
    of_ceilings,
    of_policy,
    with_primer,
)
from looseleaf_lab.evals.distance.run import DistanceRun
from looseleaf_lab.evals.distance.summary import DistanceRow, Figures, summarize
from looseleaf_lab.evals.files import FileTask

_BEST = 2
"""Policies of the comparison at one share that are tried at every share."""


@dataclass(frozen=True)
class Goal:
    """Goals of a policy: the share of plain reuse's KL that it removes, the share of questions with
    equal first tokens, and the factor of the first token over full prefill."""

    removed: float = 0.85
    agreement: float = 0.8
    sooner: float = 3.0

    def is_met(self, row: DistanceRow) -> bool:
        """Whether a row reaches all three."""
        return (
            row.kl_removed >= self.removed
            and row.agreement >= self.agreement
            and row.sooner >= self.sooner
        )


@dataclass(frozen=True)
class Calibrated:
    """The chosen ``fuse``, None for plain reuse, and whether documents get the ``primer``.

    ``developed`` and ``decided`` are its rows of even and of odd questions. ``ceiling`` is the
    largest share of KL that a choice with full knowledge removes without a primer at its share of
    tokens; None where no token is computed again, and for models without ceilings."""

    fuse: Fuse | None
    has_primer: bool
    developed: DistanceRow
    decided: DistanceRow
    ceiling: float | None

    def figures(self) -> dict[str, Any]:
        """The figures of the policy file."""
        row = self.decided
        return {
            "questions": row.questions,
            "document_tokens": round(row.tokens, 1),
            "recomputed": round(row.recomputed, 4),
            "kl": round(row.kl, 4),
            "kl_removed": round(row.kl_removed, 4),
            "agreement": round(row.agreement, 4),
            "sooner": round(row.sooner, 2),
        }


@dataclass(frozen=True)
class DistanceCalibration:
    """The search over one model and the questions of ``tasks``. ``on_row`` gets every row."""

    run: DistanceRun
    name: str
    tasks: Sequence[FileTask]
    goal: Goal
    on_row: Callable[[DistanceRow], None] = lambda row: None

    def search(self, selectors: Sequence[str], shares: Sequence[float]) -> Calibrated:
        """The policy with the least KL among those that reach the goal's speed, or the fastest.

        Raises InvalidOption for fewer than two questions."""
        if sum(len(task.entries) for task in self.tasks) < 2:
            raise InvalidOption("calibration chooses and measures on different questions: give two")
        model = self.run.llm.engine.runner.model.config
        compared = [of_policy(fuse) for name in selectors for fuse in layer_choices(name, model)]
        arms = [REUSE, *compared]
        if self.run.primer:
            arms += [with_primer(arm) for arm in arms]
        rows = dict(zip(arms, self._rows(arms, "develop"), strict=True))
        best = sorted(arms, key=lambda arm: rows[arm].kl)[:_BEST]
        wider = [_at(arm, share) for arm in best if arm.fuse for share in shares]
        wider = [arm for arm in dict.fromkeys(wider) if arm not in rows]
        rows |= zip(wider, self._rows(wider, "develop"), strict=True)
        arm = choose_arm(rows, self.goal)
        ratio = arm.fuse.ratio if arm.fuse else None
        ceiling = self._ceiling(ratio) if ratio else None
        (decided,) = self._rows([arm], "decide")
        return Calibrated(arm.fuse, arm.primed, rows[arm], decided, ceiling)

    def _ceiling(self, share: float) -> float | None:
        model = self.run.llm.engine.runner.model.config
        if model.soft_cap or any(map(model.window, range(model.num_layers))):
            # ceilings read dense attention, without windows and caps
            return None
        return max(row.kl_removed for row in self._rows(of_ceilings([share]), "develop"))

    def _rows(self, arms: Sequence[DistanceArm], part: str) -> list[DistanceRow]:
        """A row per arm over the questions of all tasks."""
        if not arms:
            return []
        every = list(dict.fromkeys([FULL, REUSE, *arms]))
        pooled: dict[str, list[Figures]] = {arm.name: [] for arm in every}
        for task in self.tasks:
            for name, figures in self.run.measure(task, every, part).items():
                pooled[name] += figures
        full, reuse = pooled[FULL.name], pooled[REUSE.name]
        if not full:
            raise InvalidOption(f"no question is left to {part}: give more questions")
        device = str(self.run.llm.engine.runner.model.device)
        file = " ".join(task.label for task in self.tasks)
        labels = {"model": self.name, "file": file, "part": part, "device": device}
        rows = [summarize(labels, arm.name, pooled[arm.name], full, reuse) for arm in arms]
        for row in rows:
            self.on_row(row)
        return rows


def _at(arm: DistanceArm, share: float) -> DistanceArm:
    """The arm at another share of tokens."""
    assert arm.fuse is not None
    if arm.fuse.ratio is None:
        return arm
    other = of_policy(replace(arm.fuse, ratio=share))
    return with_primer(other) if arm.primed else other


def layer_choices(selector: str, model: ModelConfig) -> Iterable[Fuse]:
    """A selector at `SHARE`, with each of the layers that it may read."""
    depth = model.num_layers
    if selector in ("question", "links"):
        for share in (0.25, 1.0):
            yield Fuse(selector, ratio=SHARE, watched_share=share)  # type: ignore[arg-type]
    elif selector == "deviation":
        for layer in sorted({2, max(1, depth // 8), max(1, depth // 4)}):
            if layer < depth:
                yield Fuse("deviation", ratio=SHARE, check_layers=(layer,))
    else:
        yield Fuse(selector, ratio=SHARE)  # type: ignore[arg-type]


def choose_arm(rows: Mapping[DistanceArm, DistanceRow], goal: Goal) -> DistanceArm:
    """The arm with the least KL among those as soon as the goal; without one, the soonest."""
    soon = [arm for arm, row in rows.items() if row.sooner >= goal.sooner]
    if not soon:
        return max(rows, key=lambda arm: rows[arm].sooner)
    return min(soon, key=lambda arm: rows[arm].kl)
