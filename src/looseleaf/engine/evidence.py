"""Which tokens a sequence computes again, where that takes passes over its text to know.

One sequence at a time, each pass whole. What the passes write goes to pages that the sequence owns
and that its own pass writes once more: text to its runs, tokens tried out to its patch."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan import PrefillChunk
from looseleaf.attention.watched import Watch, WatchedStep
from looseleaf.blend import Links, Question
from looseleaf.engine.fusion import FusedRows, Fusion
from looseleaf.models import Decoder
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class Evidence:
    """Chooses tokens with one model over one pool."""

    model: Decoder
    attention: PagedAttention

    @torch.inference_mode()
    def choose(self, fusion: Fusion) -> None:
        """Set the positions of the tokens that ``fusion`` computes again."""
        selector, candidates = fusion.selector, fusion.candidates
        if isinstance(selector, Links):
            scores = self._chase(fusion, selector)
        else:
            assert isinstance(selector, Question), "other selectors chose without evidence"
            scores = self._question_scores(fusion, selector)
        kept = selector.select(candidates, scores)
        fusion.positions = candidates.positions[kept].tolist()

    def _question_scores(self, fusion: Fusion, question: Question) -> Float[Tensor, " tokens"]:
        rows = fusion.text_rows()
        layers = range(self.model.config.num_layers)
        watched = [layer for layer in layers if question.watches(layer, len(layers))]
        return self._received(fusion, rows, (), watched, torch.ones(len(rows.positions)))

    def _chase(self, fusion: Fusion, links: Links) -> Float[Tensor, " tokens"]:
        candidates, pool = fusion.candidates, self.attention.pool
        chase = links.begin(candidates, self._question_scores(fusion, links.question))
        depth = links.scout_layers(self.model.config.num_layers)

        def end(layer: int, hidden: Tensor) -> Tensor:
            return hidden if layer < depth else hidden[:0]

        for _ in range(links.rounds):
            if not len(chase.scouts):
                break
            positions = candidates.positions[chase.scouts].tolist()
            pool.place(fusion.pages, positions)
            rows, weight = fusion.document_rows(positions), chase.importance[chase.scouts]
            strength = self._received(fusion, rows, positions, range(depth), weight, end)
            chase = links.follow(candidates, chase, strength)
        return chase.scores

    def _received(
        self,
        fusion: Fusion,
        rows: FusedRows,
        replaced: Sequence[int],
        layers: Container[int],
        weight: Float[Tensor, " rows"],
        hook: LayerHook | None = None,
    ) -> Float[Tensor, " tokens"]:
        """The attention that candidates receive from ``rows`` across the border of their part."""
        table = torch.from_numpy(np.ascontiguousarray(rows.table)).to(self.model.device)
        positions: list[int] = rows.positions.tolist()
        chunk = PrefillChunk(positions, fusion.spans(replaced, positions[-1]))
        starts = np.array([part.start for part in fusion.parts])
        own = starts[np.searchsorted(starts, rows.positions, "right") - 1]
        watch = Watch(fusion.stored(), layers, weight, own.tolist())
        step = WatchedStep(self.attention, chunk, table[1], table[2], watch)
        self.model.forward(table[0], step, hook)
        return step.received.cpu()
