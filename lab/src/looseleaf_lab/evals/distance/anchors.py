"""Calibration of a model's anchor layers: as few as choose as well as every layer for itself.

Even questions give the losses of all pairs of layers and propose the anchors, odd ones decide."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from looseleaf.config import Select
from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.distance.overlap import Losses, best_anchors
from looseleaf_lab.evals.distance.selection import SelectionMeter, SelectionRow
from looseleaf_lab.evals.task import Item

SERVED = (2, 3, 4, 6)
"""Numbers of layers that one choice serves on average, as they are tried."""
TOLERANCE = 1.1
"""Largest KL over that of a choice in every layer."""


@dataclass(frozen=True)
class Anchored:
    """The chosen ``anchors``, None if no number of anchors is near a choice in every layer.

    ``decided`` are rows of the odd questions: of a choice in every layer, then of the anchors."""

    anchors: tuple[int, ...] | None
    decided: tuple[SelectionRow, SelectionRow] | None

    def figures(self) -> dict[str, Any]:
        """The figures of the policy file."""
        if self.decided is None:
            return {}
        own, shared = self.decided
        return {
            "questions": own.questions,
            "policy": own.arm,
            "kl": round(own.kl, 4),
            "kl_shared": round(shared.kl, 4),
        }


@dataclass(frozen=True)
class AnchorCalibration:
    """The search over one model. ``on_row`` gets every row."""

    meter: SelectionMeter
    select: Select
    on_row: Callable[[SelectionRow], None] = lambda row: None

    def search(self, file: str, items: Sequence[Item]) -> Anchored:
        """The fewest anchors whose KL is within `TOLERANCE` of that of a choice in every layer, on
        even questions, if it is so on odd ones, too.

        Raises InvalidOption for fewer than two questions with answers."""
        items = [item for item in items if item.answers]
        if len(items) < 2:
            raise InvalidOption(
                "anchors are chosen and measured on different questions with answers: give two in "
                "a --file"
            )
        losses = self.meter.losses(items[::2], self.select)
        tried = [replace(self.select, anchors=each) for each in self.proposals(losses)]
        base, *rows = self._measure(f"{file}, even", items[::2], [self.select, *tried])
        near = [
            select for select, row in zip(tried, rows, strict=True) if row.kl <= TOLERANCE * base.kl
        ]
        if not near:
            return Anchored(None, None)
        best = min(near, key=lambda select: len(select.anchors or ()))
        own, shared = self._measure(f"{file}, odd", items[1::2], [self.select, best])
        anchors = best.anchors if shared.kl <= TOLERANCE * own.kl else None
        return Anchored(anchors, (own, shared))

    def proposals(self, losses: Losses) -> list[tuple[int, ...]]:
        """The anchors for each number of `SERVED`, over the layers of every window."""
        model = self.meter.llm.engine.runner.model.config
        choosing = np.flatnonzero(~np.isnan(np.diag(losses))).tolist()
        groups: dict[int, list[int]] = {}
        for layer in choosing:
            groups.setdefault(model.window(layer), []).append(layer)
        proposals = []
        for served in SERVED:
            anchors = [
                anchor
                for layers in groups.values()
                for anchor in best_anchors(losses, layers, math.ceil(len(layers) / served))
            ]
            proposals.append(tuple(sorted(anchors)))
        return list(dict.fromkeys(proposals))

    def _measure(
        self, file: str, items: Sequence[Item], selects: Sequence[Select]
    ) -> list[SelectionRow]:
        rows = self.meter.measure(file, items, selects)
        for row in rows:
            self.on_row(row)
        return rows
