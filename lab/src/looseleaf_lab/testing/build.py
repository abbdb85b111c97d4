"""Random scenes from a seed: documents of ragged lengths, tails, patches, hidden keys."""

import random

import torch
from torch import Tensor

from looseleaf.types import ScoreRule
from looseleaf_lab.testing.scene import (
    Placement,
    Reading,
    Scene,
    Segment,
    Shape,
    rotation_table,
    turned_at,
    visible_keys,
)


class SceneBuilder:
    """Draws segments and requests; `decode` and `prefill` return scenes."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.generator = torch.Generator(shape.device).manual_seed(seed)
        width = shape.head_dim if shape.rotary_dim is None else shape.rotary_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=shape.device)
        self.frequencies = 1.0 / 10000 ** (exponents / max(width, 1))
        self.segments: list[Segment] = []
        self.documents = [
            self.segment(self.random.randint(1, shape.longest_document), selectable=True)
            for _ in range(shape.num_documents)
        ]

    def normal(self, *size: int) -> Tensor:
        """Random numbers that are exact in the dtype of the scene."""
        shape = self.shape
        values = torch.randn(*size, generator=self.generator, device=shape.device)
        return values.to(shape.dtype) if shape.dtype != torch.float64 else values.double()

    def segment(
        self, length: int, positions: list[int] | None = None, selectable: bool = False
    ) -> Segment:
        """A segment at implicit positions, or a patch at the given ones."""
        shape = self.shape
        k = self.normal(length, shape.num_kv_heads, shape.head_dim)
        v = self.normal(length, shape.num_kv_heads, shape.head_dim)
        if shape.latent:
            v = k.clone()
            v[..., : shape.rotary_dim] = 0.0
        positions_tensor = torch.tensor(
            range(length) if positions is None else positions, device=shape.device
        )
        segment = Segment(k, v, positions_tensor, explicit=positions is not None)
        if selectable and shape.per_head:
            ordinals = range(-(-length // shape.page_size))
            segment.selected = [
                sorted(self.random.sample(ordinals, self.random.randint(0, len(ordinals))))
                for _ in range(shape.num_kv_heads)
            ]
        self.segments.append(segment)
        return segment

    def request(self) -> list[Placement]:
        """Random documents in random order, perhaps with repetitions and a patch, then a tail."""
        shape, rng = self.shape, self.random
        documents = rng.choices(self.documents, k=rng.randint(0, len(self.documents)))
        placements, patched_positions, end = [], [], rng.randint(0, 5)
        for document in documents:
            hidden: frozenset[int] = frozenset()
            if shape.masks:
                hidden = frozenset(p for p in range(document.length) if rng.random() < 0.2)
            placements.append(Placement(document, end, hidden))
            patched_positions += [end + p for p in sorted(hidden)]
            end += document.length + rng.randint(0, 3)
        if shape.patches and patched_positions:
            # the engine's patches use frame 0, but any frame is valid
            offset = rng.choice([0, min(patched_positions)])
            positions = [p - offset for p in patched_positions]
            placements.append(Placement(self.segment(len(patched_positions), positions), offset))
        tail = self.segment(rng.randint(1, shape.longest_tail))
        placements.append(Placement(tail, end))
        return placements

    def decode(self) -> Scene:
        """Rows at the end of their requests, or one before it, which do not see the last key."""
        row_positions: list[int] = []
        readings: list[Reading] = []
        for _ in range(self.shape.num_requests):
            placements = self.request()
            tail = placements[-1]
            for distance in range(self.random.choice([1, 1, 2])):
                position = max(0, tail.offset + tail.segment.length - 1 - distance)
                row = len(row_positions)
                row_positions.append(position)
                readings += [causal(row, position, placement) for placement in placements]
        return self.scene(row_positions, readings)

    def prefill(self) -> tuple[Scene, list[list[int]], list[list[Placement]]]:
        """Rows at random positions; also the rows and the placements of each request."""
        row_positions: list[int] = []
        readings: list[Reading] = []
        rows_of, spans_of = [], []
        for _ in range(self.shape.num_requests):
            placements = self.request()
            end = placements[-1].offset + placements[-1].segment.length
            max_rows = min(end, self.shape.most_rows)
            positions = sorted(self.random.sample(range(end), self.random.randint(1, max_rows)))
            rows = list(range(len(row_positions), len(row_positions) + len(positions)))
            row_positions += positions
            for row, position in zip(rows, positions, strict=True):
                readings += [causal(row, position, placement) for placement in placements]
            rows_of.append(rows)
            spans_of.append(placements)
        return self.scene(row_positions, readings), rows_of, spans_of

    def scene(self, row_positions: list[int], readings: list[Reading]) -> Scene:
        """The scene of these rows and readings, over all segments so far."""
        shape = self.shape
        k_pages, v_pages, slot_positions = self._pages()
        q = self.normal(len(row_positions), shape.num_qo_heads, shape.head_dim)
        table_dtype = torch.float64 if shape.dtype == torch.float64 else torch.float32
        num_positions = max(row_positions, default=0) + 1 + shape.longest_document
        rotation = rotation_table(self.frequencies, num_positions, shape.interleaved, table_dtype)
        slopes = None
        if shape.alibi:
            steps = torch.arange(1, shape.num_qo_heads + 1, device=shape.device)
            slopes = 2.0 ** (-8.0 * steps / shape.num_qo_heads)
        scale = shape.softmax_scale or shape.head_dim**-0.5
        rule = ScoreRule(scale, shape.soft_cap, shape.window, slopes)
        scene = Scene(
            shape, q, row_positions, readings, self.frequencies, rotation, rule,
            k_pages, v_pages, slot_positions,
        )  # fmt: skip
        self._poison_unseen(scene)
        return scene

    def _poison_unseen(self, scene: Scene) -> None:
        """Set stored keys that no row sees to NaN."""
        visible = {id(s): torch.zeros_like(s.k[..., 0], dtype=torch.bool) for s in self.segments}
        for reading in scene.readings:
            visible[id(reading.placement.segment)] |= visible_keys(scene, reading)
        for segment in self.segments:
            position, head = torch.nonzero(~visible[id(segment)], as_tuple=True)
            page = torch.tensor(segment.pages, device=position.device)[
                position // self.shape.page_size
            ]
            scene.k_pages[page, head, position % self.shape.page_size] = torch.nan
            scene.v_pages[page, head, position % self.shape.page_size] = torch.nan

    def _pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """All segments at shuffled pages of a pool with NaN in unused slots."""
        shape = self.shape
        page_counts = [-(-s.length // shape.page_size) for s in self.segments]
        order = list(range(sum(page_counts) + 3))
        self.random.shuffle(order)
        size = (len(order), shape.num_kv_heads, shape.page_size, shape.head_dim)
        k_pages = torch.full(size, torch.nan, dtype=shape.dtype, device=shape.device)
        v_pages = k_pages if shape.latent else k_pages.clone()
        # only patches have slot positions; other pages hold an arbitrary value
        slots = torch.full((len(order), shape.page_size), 3, dtype=torch.int32, device=shape.device)
        wide = torch.float64 if shape.dtype == torch.float64 else torch.float32
        for segment, count in zip(self.segments, page_counts, strict=True):
            segment.pages = [order.pop() for _ in range(count)]
            k = turned_at(
                segment.k.to(wide), segment.positions, self.frequencies, shape.interleaved
            )
            position = torch.arange(segment.length, device=shape.device)
            page = torch.tensor(segment.pages, device=shape.device)[position // shape.page_size]
            k_pages[page, :, position % shape.page_size] = k.to(shape.dtype)
            if not shape.latent:
                v_pages[page, :, position % shape.page_size] = segment.v
            if segment.explicit:
                slots[torch.tensor(segment.pages, device=shape.device)] = -1
                slots[page, position % shape.page_size] = segment.positions.int()
        return k_pages, v_pages, slots


def causal(row: int, position: int, placement: Placement) -> Reading:
    """A row's reading of the keys up to its position, as far as the segment goes."""
    bound = position - placement.offset + 1
    if not placement.segment.explicit:
        bound = min(bound, placement.segment.length)
    return Reading(row, placement, bound)
