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
from looseleaf.attention.watched import ChunkStep, Watch, WatchedStep
from looseleaf.blend import Deviation, Links, Oracle, Question, RowFilter, kv_deviation
from looseleaf.engine.following import Following
from looseleaf.engine.fusion import FusedRows, Fusion, IntArray
from looseleaf.kv.store import Arriving
from looseleaf.models import Decoder
from looseleaf.ops.rotate import rotate
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class Evidence:
    """Chooses tokens with one model over one pool. A layer of a pass comes behind that layer of the
    documents ``awaited``, and what waiting for them raises, `choose` raises."""

    model: Decoder
    attention: PagedAttention
    awaited: Sequence[Arriving] = ()

    @torch.inference_mode()
    def choose(self, fusion: Fusion) -> None:
        """Set the positions of the tokens that ``fusion`` computes again; deviation computes them
        as well.
        """
        selector, candidates = fusion.selector, fusion.candidates
        if isinstance(selector, Deviation):
            positions = self._deviating(fusion, selector)
        else:
            if isinstance(selector, Oracle):
                scores = self._true_deviation(fusion)
            elif isinstance(selector, Links):
                scores = self._chase(fusion, selector)
            else:
                assert isinstance(selector, Question), "other selectors choose without evidence"
                scores = self._question_scores(fusion, selector)
            fusion.scores = scores
            positions = candidates.positions[selector.select(candidates, scores)].tolist()
        self.attention.pool.free(fusion.settle(positions))

    def _question_scores(self, fusion: Fusion, question: Question) -> Float[Tensor, " tokens"]:
        rows = fusion.text_rows()
        layers = range(self.model.config.num_layers)
        watched = [layer for layer in layers if question.watches(layer, len(layers))]
        return self._received(fusion, rows, (), watched, torch.ones(len(rows.positions)))

    def _chase(self, fusion: Fusion, links: Links) -> Float[Tensor, " tokens"]:
        candidates = fusion.candidates
        chase = links.begin(candidates, self._question_scores(fusion, links.question))
        depth = links.scout_layers(self.model.config.num_layers)

        def end(layer: int, hidden: Tensor) -> Tensor:
            return hidden if layer < depth else hidden[:0]

        for _ in range(links.rounds):
            if not len(chase.scouts):
                break
            positions = candidates.positions[chase.scouts].tolist()
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
        starts = np.array([part.start for part in fusion.parts])
        own = starts[np.searchsorted(starts, rows.positions, "right") - 1]
        watch = Watch(fusion.stored(), layers, weight, own.tolist())
        tokens, step = self._step(fusion, rows, replaced)
        watched = WatchedStep(step, watch)
        self.model.forward(tokens, Following(watched, self.awaited), hook)
        return watched.received.cpu()

    def _step(
        self, fusion: Fusion, rows: FusedRows, replaced: Sequence[int]
    ) -> tuple[Tensor, ChunkStep]:
        """The tokens of ``rows`` and their attention, with the tokens at ``replaced`` in the
        patch.
        """
        if len(replaced):
            self.attention.pool.place(fusion.pages, replaced)
        table = torch.from_numpy(np.ascontiguousarray(rows.table)).to(self.model.device)
        positions: list[int] = rows.positions.tolist()
        chunk = PrefillChunk(positions, fusion.spans(replaced, positions[-1]))
        return table[0], ChunkStep(self.attention, chunk, table[1], table[2])

    def _deviating(self, fusion: Fusion, selector: Deviation) -> list[int]:
        """The tokens left behind the last check layer, of a pass that all begin together.

        It computes them as well: the patch is theirs when it ends."""
        candidates = fusion.candidates
        everyone: list[int] = candidates.positions.tolist()
        rows = fusion.pass_rows(everyone)
        narrow = RowFilter(
            selector,
            candidates,
            torch.from_numpy(np.searchsorted(rows.positions, everyone)),
            len(rows.positions),
            lambda layer, hidden, among: self._deviations(
                fusion, layer, hidden, rows.positions[among.numpy()]
            ),
        )
        attend = _Moving()
        tokens, attend.step = self._step(fusion, rows, everyone)
        left: dict[int, list[int]] = {0: everyone}

        def hook(layer: int, hidden: Tensor) -> Tensor:
            hidden = narrow(layer, hidden)
            if layer in selector.check_layers:
                left[layer] = narrow.candidates.positions.tolist()
                if left[layer]:
                    kept = fusion.pass_rows(left[layer])
                    _, attend.step = self._step(fusion, kept, left[layer])
            # without a token that is left nothing is worth going on for
            return hidden if len(narrow.candidates) else hidden[:0]

        self.model.forward(tokens, Following(attend, self.awaited), hook)
        self._gather(fusion, left)
        fusion.patched = True
        return left[selector.check_layers[-1]]

    def _true_deviation(self, fusion: Fusion) -> Float[Tensor, " tokens"]:
        """How far stored keys and values are from those of the full prefill, over all layers."""
        everyone: list[int] = fusion.candidates.positions.tolist()
        rows = fusion.pass_rows(everyone)
        among = torch.from_numpy(np.searchsorted(rows.positions, everyone))
        total = torch.zeros(len(everyone))

        def measure(layer: int, hidden: Tensor) -> Tensor:
            at = rows.positions[among.numpy()]
            total.add_(self._deviations(fusion, layer, hidden[among.to(hidden.device)], at))
            return hidden

        tokens, step = self._step(fusion, rows, everyone)
        self.model.forward(tokens, Following(step, self.awaited), measure)
        return total

    def _gather(self, fusion: Fusion, left: dict[int, list[int]]) -> None:
        """Bring the keys and values of the tokens that are left at the end to the beginning of the
        patch, from where they were when those ``left`` since a layer had it.
        """
        pool, layers = self.attention.pool, sorted(left)
        final = np.asarray(left[layers[-1]], dtype=np.int64)
        stops = [*layers[1:], layers[-1]]
        for first, stop in zip(layers, stops, strict=True):
            was = fusion.patch_slots(np.searchsorted(np.asarray(left[first]), final))
            now = fusion.patch_slots(np.arange(len(final)))
            old, new = (torch.from_numpy(x).to(self.model.device) for x in (was, now))
            size = pool.page_size
            source = old // size, slice(None), old % size
            target = new // size, slice(None), new % size
            for layer in range(first, stop):
                for pages in pool.layer(layer):
                    pages[target] = pages[source]

    def _deviations(
        self, fusion: Fusion, layer: int, hidden: Tensor, positions: IntArray
    ) -> Float[Tensor, " rows"]:
        """How far fresh keys and values of document tokens are from the stored ones."""
        pool = self.attention.pool
        for arriving in self.awaited:
            arriving.wait(layer)
        slots, places = (
            torch.from_numpy(x).to(hidden.device) for x in fusion.stored_slots(positions)
        )
        keys, values = self.model.keys_values(layer, hidden)
        turned = rotate(keys, places, self.attention.rotation)
        at = slots // pool.page_size, slice(None), slots % pool.page_size
        stored_keys, stored_values = (pages[at] for pages in pool.layer(layer))
        return kv_deviation(turned, values, stored_keys, stored_values).cpu()


class _Moving:
    """The attention of a pass whose rows become fewer: that of the latest step."""

    step: ChunkStep

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.step(layer, q, k, v)
