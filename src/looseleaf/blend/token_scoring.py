"""Token scoring: the passes that score document tokens, and the choice of tokens to compute again.

A pass is never cut into chunks. Sequences that score by their text share passes. Passes write to
pages that the sequence owns, and the answering pass writes these again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.blend import Chase, RowFilter, kv_deviation
from looseleaf.blend.fusion import Begun, FusedRows, Fusion, IntArray
from looseleaf.blend.scoring_graphs import ScoringGraphs
from looseleaf.blend.watched import ChunkStep, Watch, WatchedStep, no_rows
from looseleaf.graphs.layerwise import LayerwiseWait, wait_for_layer
from looseleaf.graphs.rows import join_tables, to_device
from looseleaf.kv.store import PendingLoad
from looseleaf.models import Decoder
from looseleaf.ops.rotate import rotate
from looseleaf.types import Attend, LayerHook

# a layer with up to this many rows takes as long as reading its weights
_TEXT_PASS_ROWS = 256
Scores = Float[Tensor, " tokens"]


@dataclass(frozen=True)
class _Readers:
    """Watched rows of one fusion with their ``weight``; tokens at ``replaced`` are in the patch."""

    fusion: Fusion
    rows: FusedRows
    weight: Float[Tensor, " rows"]
    replaced: IntArray

    @classmethod
    def text(cls, fusion: Fusion) -> "_Readers":
        """The rows of the prompt's text, with weight 1."""
        rows = fusion.text_rows()
        return cls(fusion, rows, torch.ones(len(rows.positions)), rows.positions[:0])

    @property
    def before(self) -> list[int]:
        """The position at which the part of each row begins."""
        starts = np.array([part.start for part in self.fusion.parts])
        own: list[int] = starts[np.searchsorted(starts, self.rows.positions, "right") - 1].tolist()
        return own


@dataclass
class TokenScoring:
    """Scores and chooses tokens with one model over one pool.

    Each layer of a pass waits for that layer of the ``awaited`` loads, and `choose` raises their
    errors. ``passes`` has graphs of passes of few rows; None without graphs."""

    model: Decoder
    attention: PagedAttention
    awaited: Sequence[PendingLoad] = ()
    passes: ScoringGraphs | None = None
    _launched: float | None = None

    @torch.inference_mode()
    def choose(self, fusions: Sequence[Fusion]) -> float | None:
        """Set the positions of the tokens that ``fusions`` compute again.

        Deviation also computes these tokens, completely or up to the last check layer. Returns the
        time of the first launch, on the clock `time.perf_counter`."""
        self._launched = None
        # fusions with different budgets share a pass over the same layers
        by_share: dict[float, list[Fusion]] = {}
        for fusion in fusions:
            evidence = fusion.selector.evidence
            if evidence == "deviation":
                self._settle(fusion, self._deviating(fusion))
            elif evidence == "oracle":
                self._select(fusion, self._true_deviation(fusion))
            else:
                by_share.setdefault(fusion.selector.watched_share, []).append(fusion)
        for together in by_share.values():
            readers = [_Readers.text(fusion) for fusion in together]
            layers, selector = range(self.model.config.num_layers), together[0].selector
            watched = [layer for layer in layers if selector.watches(layer, len(layers))]
            scores = self._received(readers, watched, len(layers))
            self._chase(
                [
                    (fusion, fusion.selector.begin(fusion.candidates, received))
                    for fusion, received in zip(together, scores, strict=True)
                ]
            )
        return self._launched

    def _select(self, fusion: Fusion, scores: Scores) -> None:
        fusion.scores = scores
        kept = fusion.selector.select(fusion.candidates, scores)
        self._settle(fusion, fusion.candidates.positions[kept].numpy())

    def _settle(self, fusion: Fusion, positions: IntArray) -> None:
        self.attention.pool.free(fusion.settle(positions))

    def _chase(self, chases: list[tuple[Fusion, Chase]]) -> None:
        """Run all rounds of links, each round in one pass for all fusions, and choose tokens."""
        round_number = 0
        while chases:
            active = []
            for fusion, chase in chases:
                if round_number < fusion.selector.rounds and len(chase.scouts):
                    active.append((fusion, chase))
                else:
                    self._select(fusion, chase.scores)
            round_number, chases = round_number + 1, []
            for depth, group in _by_depth(active, self.model.config.num_layers).items():
                chases += self._follow(group, depth)

    def _follow(self, active: list[tuple[Fusion, Chase]], depth: int) -> list[tuple[Fusion, Chase]]:
        readers = []
        for fusion, chase in active:
            positions = fusion.candidates.positions[chase.scouts].numpy()
            weight = chase.importance[chase.scouts]
            rows = fusion.document_rows(positions)
            readers.append(_Readers(fusion, rows, weight, positions))
        strength = self._received(readers, range(depth), depth)
        return [
            (fusion, fusion.selector.follow(fusion.candidates, chase, received))
            for (fusion, chase), received in zip(active, strength, strict=True)
        ]

    def _received(
        self, readers: Sequence[_Readers], layers: Sequence[int], depth: int
    ) -> list[Scores]:
        """The attention that candidates of each fusion receive from rows of later parts.

        One pass through the first ``depth`` layers computes it for all ``readers``."""
        spans = [reader.fusion.stored() for reader in readers]
        before = [position for reader in readers for position in reader.before]
        watch = Watch(spans, layers, torch.cat([reader.weight for reader in readers]), before)
        table, chunks = self._rows([(r.fusion, r.rows, r.replaced) for r in readers])
        received = None
        if self.passes is not None:
            replayed = self.passes.received(table, chunks, watch, depth, self.awaited)
            if replayed is not None:
                received, launched = replayed
                self._launched = self._launched or launched
        if received is None:
            tokens, step = self._step_of(table, chunks)
            watched = WatchedStep.create(step, chunks, watch)
            hook = None if depth == self.model.config.num_layers else no_rows
            self._forward(tokens, watched, hook, (depth,))
            received = watched.received
        if self.model.ranks is not None:
            # the largest weight over all heads
            received = self.model.ranks.largest(received)
        lengths = [sum(span.length for span in stored) for stored in spans]
        return list(received.cpu().split(lengths))

    def _step(
        self, parts: Sequence[tuple[Fusion, FusedRows, IntArray]]
    ) -> tuple[Tensor, ChunkStep]:
        """The tokens and attention of rows of each fusion; the third item are the positions of
        tokens in its patch."""
        return self._step_of(*self._rows(parts))

    def _rows(
        self, parts: Sequence[tuple[Fusion, FusedRows, IntArray]]
    ) -> tuple[IntArray, list[PrefillChunk]]:
        chunks = []
        for fusion, rows, replaced in parts:
            if len(replaced):
                self.attention.pool.set_positions(fusion.pages, replaced)
            spans = fusion.spans(replaced, int(rows.positions[-1]))
            chunks.append(PrefillChunk(rows.positions, spans))
        return join_tables([rows.table for _, rows, _ in parts]), chunks

    def _step_of(self, table: IntArray, chunks: Sequence[PrefillChunk]) -> tuple[Tensor, ChunkStep]:
        tokens, slots, offsets = to_device(torch.from_numpy(table), self.model.device)
        spans = self.attention.planner.span_list(chunks)
        return tokens, ChunkStep(self.attention, spans, slots, offsets)

    def _forward(
        self,
        tokens: Tensor,
        attend: Attend,
        hook: LayerHook | None,
        hooked: Sequence[int] | None = None,
    ) -> None:
        self._launched = self._launched or time.perf_counter()
        self.model.forward(tokens, LayerwiseWait(attend, self.awaited), hook, hooked=hooked)

    def _deviating(self, fusion: Fusion) -> IntArray:
        """The positions that remain after the last check layer of a pass over all candidates.

        The pass also computes their keys and values into the patch. Where passes replay, it ends at
        the last check layer, because its few rows continue faster together with the text."""
        candidates, selector = fusion.candidates, fusion.selector
        all_positions = candidates.positions.numpy()
        rows = fusion.pass_rows(all_positions)
        narrow = RowFilter(
            selector,
            candidates,
            torch.from_numpy(np.searchsorted(rows.positions, all_positions)),
            len(rows.positions),
            lambda layer, hidden, among: self._deviations(
                fusion, layer, hidden, rows.positions[among.numpy()]
            ),
        )
        attend = _ShrinkingStep()
        tokens, attend.step = self._step([(fusion, rows, all_positions)])
        remaining, last = {0: all_positions}, selector.check_layers[-1]

        def hook(layer: int, hidden: Tensor) -> Tensor:
            hidden = narrow(layer, hidden)
            positions = remaining[layer] = narrow.candidates.positions.numpy()
            if not len(positions):
                return hidden[:0]
            if layer == last and self._ends_early(last, len(positions)):
                fusion.begun = Begun(layer, narrow.candidate_states(hidden))
                return hidden[:0]
            _, attend.step = self._step([(fusion, fusion.pass_rows(positions), positions)])
            return hidden

        self._forward(tokens, attend, hook, selector.check_layers)
        self._compact(fusion, remaining)
        fusion.patched = fusion.begun is None
        return remaining[max(remaining)]

    def _ends_early(self, layer: int, num_rows: int) -> bool:
        """Whether rows that remain at the last check layer continue in the answering pass.

        They pass the earlier layers again as padding, which must cost less than a text pass."""
        text_cost = self.model.config.num_layers * _TEXT_PASS_ROWS
        return self.passes is not None and layer * num_rows <= text_cost

    def _true_deviation(self, fusion: Fusion) -> Float[Tensor, " tokens"]:
        """The deviation of stored keys and values from a full prefill, summed over all layers."""
        positions = fusion.candidates.positions.numpy()
        rows = fusion.pass_rows(positions)
        indices = torch.from_numpy(np.searchsorted(rows.positions, positions))
        total = torch.zeros(len(positions))

        def measure(layer: int, hidden: Tensor) -> Tensor:
            states = hidden[indices.to(hidden.device)]
            total.add_(self._deviations(fusion, layer, states, positions))
            return hidden

        tokens, step = self._step([(fusion, rows, positions)])
        self._forward(tokens, step, measure)
        return total

    def _compact(self, fusion: Fusion, remaining: dict[int, IntArray]) -> None:
        """Move keys and values of the final tokens to the beginning of the patch.

        ``remaining`` has, by check layer, the positions whose keys later layers wrote in order."""
        pool, layers = self.attention.pool, sorted(remaining)
        final = remaining[layers[-1]]
        if not len(final):
            return
        for first, stop in pairwise(layers):
            old = fusion.patch_slots(np.searchsorted(remaining[first], final))
            new = fusion.patch_slots(np.arange(len(final)))
            table = np.stack([*np.divmod(old, pool.page_size), *np.divmod(new, pool.page_size)])
            index = to_device(torch.from_numpy(table), self.model.device)
            old_page, old_slot, new_page, new_slot = index
            kv = pool.kv[first:stop]
            kv[:, :, new_page, :, new_slot] = kv[:, :, old_page, :, old_slot]

    def _deviations(
        self, fusion: Fusion, layer: int, hidden: Tensor, positions: IntArray
    ) -> Float[Tensor, " rows"]:
        """`kv_deviation` of document tokens between fresh and stored keys and values."""
        pool = self.attention.pool
        wait_for_layer(self.awaited, layer)
        slots, offsets = fusion.stored_slots(positions)
        table = np.stack([*np.divmod(slots, pool.page_size), offsets])
        page, slot, offset = to_device(torch.from_numpy(table), hidden.device)
        keys, values = self.model.keys_values(layer, hidden)
        rotated = rotate(keys, offset, self.attention.rotations[layer])
        stored_keys, stored_values = (kv[page, :, slot] for kv in pool.layer(layer))
        latent, ranks = self.model.config.latent, self.model.ranks
        if latent is not None:
            # values are the keys' dims that do not rotate
            values, stored_values = (x[..., latent.rope_dim :] for x in (keys, stored_keys))
        return kv_deviation(rotated, values, stored_keys, stored_values, ranks).cpu()


def _by_depth(
    active: list[tuple[Fusion, Chase]], num_layers: int
) -> dict[int, list[tuple[Fusion, Chase]]]:
    """Searches by the number of layers that their scouts pass."""
    groups: dict[int, list[tuple[Fusion, Chase]]] = {}
    for fusion, chase in active:
        groups.setdefault(fusion.selector.scout_layers(num_layers), []).append((fusion, chase))
    return groups


class _ShrinkingStep:
    """The attention of a pass with fewer rows after each check layer: the current step."""

    step: ChunkStep

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self.step(layer, q, k, v)
