"""Which tokens sequences compute again, where that takes passes over their text to know.

Each pass is whole; sequences that ask by their text alone ask together. What the passes write goes
to pages that the sequence owns and that its own pass writes once more: text to its runs, tokens
tried out to its patch."""

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
from looseleaf.attention.watched import ChunkStep, Watch, WatchedStep
from looseleaf.blend import (
    Budget,
    Chase,
    Deviation,
    Links,
    Oracle,
    Question,
    RowFilter,
    kv_deviation,
)
from looseleaf.blend.fusion import Begun, FusedRows, Fusion, IntArray
from looseleaf.graphs.layerwise import LayerwiseWait, wait_for_layer
from looseleaf.graphs.prefill import PassGraphs, no_rows
from looseleaf.graphs.rows import join_tables, to_device
from looseleaf.kv.store import PendingLoad
from looseleaf.models import Decoder
from looseleaf.ops.rotate import rotate
from looseleaf.types import Attend, LayerHook

# a layer takes as long for so many rows as for the few of a text: to read its weights
_TEXT_PASS_ROWS = 256
Scores = Float[Tensor, " tokens"]


@dataclass(frozen=True)
class _Readers:
    """Rows of one fusion that are watched, ``weight`` of each, with the tokens at ``replaced`` in
    the patch.
    """

    fusion: Fusion
    rows: FusedRows
    weight: Float[Tensor, " rows"]
    replaced: IntArray

    @classmethod
    def text(cls, fusion: Fusion) -> "_Readers":
        """The prompt's own text, all of which counts."""
        rows = fusion.text_rows()
        return cls(fusion, rows, torch.ones(len(rows.positions)), rows.positions[:0])

    @property
    def before(self) -> list[int]:
        """Where the part of each row begins."""
        starts = np.array([part.start for part in self.fusion.parts])
        own: list[int] = starts[np.searchsorted(starts, self.rows.positions, "right") - 1].tolist()
        return own


@dataclass
class TokenScoring:
    """Chooses tokens with one model over one pool. A layer of a pass comes behind that layer of the
    documents ``awaited``, and what waiting for them raises, `choose` raises. ``passes`` has graphs
    of passes of few rows, if there are any."""

    model: Decoder
    attention: PagedAttention
    awaited: Sequence[PendingLoad] = ()
    passes: PassGraphs | None = None
    _launched: float | None = None

    @torch.inference_mode()
    def choose(self, fusions: Sequence[Fusion]) -> float | None:
        """Set the positions of the tokens that ``fusions`` compute again; deviation computes them
        as well, or begins to. Returns when the first pass was launched, on the clock
        `time.perf_counter`.
        """
        self._launched = None
        asking: dict[Question, list[Fusion]] = {}
        for fusion in fusions:
            selector = fusion.selector
            if isinstance(selector, Deviation):
                self._settle(fusion, self._deviating(fusion, selector))
            elif isinstance(selector, Oracle):
                self._select(fusion, self._true_deviation(fusion))
            else:
                question = selector.question if isinstance(selector, Links) else selector
                assert isinstance(question, Question), "other selectors choose without evidence"
                # budgets may differ, layers not
                alike = Question(Budget(ratio=0.0), question.watched_share)
                asking.setdefault(alike, []).append(fusion)
        for question, together in asking.items():
            readers = [_Readers.text(fusion) for fusion in together]
            layers = range(self.model.config.num_layers)
            watched = [layer for layer in layers if question.watches(layer, len(layers))]
            scores = self._received(readers, watched, len(layers))
            chasing = []
            for fusion, found in zip(together, scores, strict=True):
                if isinstance(fusion.selector, Links):
                    chasing.append((fusion, fusion.selector.begin(fusion.candidates, found)))
                else:
                    self._select(fusion, found)
            self._chase(chasing)
        return self._launched

    def _select(self, fusion: Fusion, scores: Scores) -> None:
        fusion.scores = scores
        kept = fusion.selector.select(fusion.candidates, scores)
        self._settle(fusion, fusion.candidates.positions[kept].numpy())

    def _settle(self, fusion: Fusion, positions: IntArray) -> None:
        self.attention.pool.free(fusion.settle(positions))

    def _chase(self, chasing: list[tuple[Fusion, Chase]]) -> None:
        """Follow the links of some fusions, a round of all of them in a pass, and choose."""
        turn = 0
        while chasing:
            going = []
            for fusion, chase in chasing:
                assert isinstance(fusion.selector, Links)
                if turn < fusion.selector.rounds and len(chase.scouts):
                    going.append((fusion, fusion.selector, chase))
                else:
                    self._select(fusion, chase.scores)
            turn, chasing = turn + 1, []
            for depth, some in _by_depth(going, self.model.config.num_layers).items():
                chasing += self._follow(some, depth)

    def _follow(
        self, going: list[tuple[Fusion, Links, Chase]], depth: int
    ) -> list[tuple[Fusion, Chase]]:
        readers = []
        for fusion, _, chase in going:
            positions = fusion.candidates.positions[chase.scouts].numpy()
            weight = chase.importance[chase.scouts]
            rows = fusion.document_rows(positions)
            readers.append(_Readers(fusion, rows, weight, positions))
        strength = self._received(readers, range(depth), depth)
        return [
            (fusion, links.follow(fusion.candidates, chase, found))
            for (fusion, links, chase), found in zip(going, strength, strict=True)
        ]

    def _received(
        self, readers: Sequence[_Readers], layers: Sequence[int], depth: int
    ) -> list[Scores]:
        """The attention that candidates of each fusion receive from its rows across the border of
        their part, in one pass through the first ``depth`` layers.
        """
        spans = [one.fusion.stored() for one in readers]
        before = [at for one in readers for at in one.before]
        watch = Watch(spans, layers, torch.cat([one.weight for one in readers]), before)
        table, chunks = self._rows([(one.fusion, one.rows, one.replaced) for one in readers])
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
        lengths = [sum(span.length for span in some) for some in spans]
        return list(received.cpu().split(lengths))

    def _step(
        self, parts: Sequence[tuple[Fusion, FusedRows, IntArray]]
    ) -> tuple[Tensor, ChunkStep]:
        """The tokens of some rows of each fusion and their attention, with the tokens at the given
        positions in its patch.
        """
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
        held = to_device(torch.from_numpy(table), self.model.device)
        spans = self.attention.planner.span_list(chunks)
        return held[0], ChunkStep(self.attention, spans, held[1], held[2])

    def _forward(
        self,
        tokens: Tensor,
        attend: Attend,
        hook: LayerHook | None,
        hooked: Sequence[int] | None = None,
    ) -> None:
        self._launched = self._launched or time.perf_counter()
        self.model.forward(tokens, LayerwiseWait(attend, self.awaited), hook, hooked=hooked)

    def _deviating(self, fusion: Fusion, selector: Deviation) -> IntArray:
        """The tokens left behind the last check layer, of a pass that all begin together.

        It computes them as well: the patch is theirs when it ends. Where passes replay it ends
        with the last check layer: its few rows are done sooner together with the text."""
        candidates = fusion.candidates
        everyone = candidates.positions.numpy()
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
        tokens, attend.step = self._step([(fusion, rows, everyone)])
        left, last = {0: everyone}, selector.check_layers[-1]

        def hook(layer: int, hidden: Tensor) -> Tensor:
            hidden = narrow(layer, hidden)
            left[layer] = narrow.candidates.positions.numpy()
            # without a token that is left nothing is worth going on for
            if not len(left[layer]):
                return hidden[:0]
            if layer == last and self._ends_early(last, len(left[last])):
                fusion.begun = Begun(layer, narrow.candidate_states(hidden))
                return hidden[:0]
            kept = fusion.pass_rows(left[layer])
            _, attend.step = self._step([(fusion, kept, left[layer])])
            return hidden

        self._forward(tokens, attend, hook, selector.check_layers)
        self._gather(fusion, left)
        fusion.patched = fusion.begun is None
        return left[max(left)]

    def _ends_early(self, layer: int, num_left: int) -> bool:
        """Whether rows that are left at the last check layer go on in their request's own pass.

        There they pass the layers before in vain, but the text needs no pass for itself."""
        alone = self.model.config.num_layers * _TEXT_PASS_ROWS
        return self.passes is not None and layer * num_left <= alone

    def _true_deviation(self, fusion: Fusion) -> Float[Tensor, " tokens"]:
        """How far stored keys and values are from those of the full prefill, over all layers."""
        everyone = fusion.candidates.positions.numpy()
        rows = fusion.pass_rows(everyone)
        among = torch.from_numpy(np.searchsorted(rows.positions, everyone))
        total = torch.zeros(len(everyone))

        def measure(layer: int, hidden: Tensor) -> Tensor:
            at = rows.positions[among.numpy()]
            total.add_(self._deviations(fusion, layer, hidden[among.to(hidden.device)], at))
            return hidden

        tokens, step = self._step([(fusion, rows, everyone)])
        self._forward(tokens, step, measure)
        return total

    def _gather(self, fusion: Fusion, left: dict[int, IntArray]) -> None:
        """Bring the keys and values of the tokens that are left at the end to the beginning of the
        patch, from where they were when those ``left`` since a layer had it.
        """
        pool, layers = self.attention.pool, sorted(left)
        final = left[layers[-1]]
        if not len(final):
            return
        for first, stop in pairwise(layers):
            was = fusion.patch_slots(np.searchsorted(left[first], final))
            now = fusion.patch_slots(np.arange(len(final)))
            halves = np.stack([*np.divmod(was, pool.page_size), *np.divmod(now, pool.page_size)])
            held = to_device(torch.from_numpy(halves), self.model.device)
            pages, every = pool.kv[first:stop], slice(None)
            source = every, every, held[0], every, held[1]
            pages[every, every, held[2], every, held[3]] = pages[source]

    def _deviations(
        self, fusion: Fusion, layer: int, hidden: Tensor, positions: IntArray
    ) -> Float[Tensor, " rows"]:
        """How far fresh keys and values of document tokens are from the stored ones."""
        pool = self.attention.pool
        wait_for_layer(self.awaited, layer)
        slots, places = fusion.stored_slots(positions)
        numbers = np.stack([*np.divmod(slots, pool.page_size), places])
        held = to_device(torch.from_numpy(numbers), hidden.device)
        keys, values = self.model.keys_values(layer, hidden)
        turned = rotate(keys, held[2], self.attention.rotations[layer])
        at = held[0], slice(None), held[1]
        stored_keys, stored_values = (pages[at] for pages in pool.layer(layer))
        return kv_deviation(turned, values, stored_keys, stored_values).cpu()


def _by_depth(
    going: list[tuple[Fusion, Links, Chase]], num_layers: int
) -> dict[int, list[tuple[Fusion, Links, Chase]]]:
    """Chases whose scouts go through the same layers, together."""
    found: dict[int, list[tuple[Fusion, Links, Chase]]] = {}
    for one in going:
        found.setdefault(one[1].scout_layers(num_layers), []).append(one)
    return found


class _Moving:
    """The attention of a pass whose rows become fewer: that of the latest step."""

    step: ChunkStep

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.step(layer, q, k, v)
