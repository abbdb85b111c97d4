"""Work lists and span lists of a scene, in all forms that must give the same answer."""

import random
from dataclasses import replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from looseleaf.ops.partial_attention.unit_numbers import unit_numbers
from looseleaf.ops.partial_attention.work_list import Tile, WorkList
from looseleaf.ops.prefill_attention.span_list import SpanList
from looseleaf.ops.prefill_attention.units import UnitCosts, span_units
from looseleaf_lab.testing.scene import Placement, Reading, Scene, Segment

GARBAGE = -(2**30)
"""The value of unused capacity: a read of it fails."""


def work_list(
    scene: Scene,
    *,
    grouped: bool = True,
    pages_per_item: int | None = None,
    slack: int = 3,
    seed: int = 0,
) -> WorkList:
    """The readings of a decode scene as items, with one or all readers of a segment per item."""
    items = _items(scene, grouped, pages_per_item)
    random.Random(seed).shuffle(items)
    states_of_row = [0] * len(scene.row_positions)
    for _, _, _, readers in items:
        for reading in readers:
            states_of_row[reading.row] += 1
    indptr = [0, *accumulate(states_of_row)]
    next_state = list(indptr)
    columns: list[list[int]] = [[], [], [], [], []]
    masks = _Masks()
    for _, _, _, readers in items:
        for reading in readers:
            placement, row = reading.placement, reading.row
            values = (
                row, placement.offset, reading.bound, masks.first_word(placement), next_state[row],
            )  # fmt: skip
            next_state[row] += 1
            for column, value in zip(columns, values, strict=True):
                column.append(value)

    runs = [[segment.pages[n] for n in ordinals] for segment, _, ordinals, _ in items]
    starts = [[n * scene.shape.page_size for n in ordinals] for _, _, ordinals, _ in items]
    device = scene.shape.device
    return WorkList(
        num_items=_int32([len(items)], 0, device),
        item_page_indptr=_int32([0, *accumulate(map(len, runs))], slack, device),
        item_entry_indptr=_int32([0, *accumulate(len(i[3]) for i in items)], slack, device),
        item_kv_head=_int32([head for _, head, _, _ in items], slack, device),
        item_explicit=_int32([int(segment.explicit) for segment, _, _, _ in items], slack, device),
        page_indices=_int32([*chain(*runs)], slack, device),
        page_positions=_int32([*chain(*starts)], slack, device),
        entry_row=_int32(columns[0], slack, device),
        entry_offset=_int32(columns[1], slack, device),
        entry_bound=_int32(columns[2], slack, device),
        entry_mask=_int32(columns[3], slack, device),
        entry_state=_int32(columns[4], slack, device),
        mask_words=_int32(masks.words, 0, device),
        row_positions=_int32(scene.row_positions, slack, device),
        row_state_indptr=_int32(indptr, 0, device),
    )


def span_list(
    scene: Scene,
    rows_of: list[list[int]],
    spans_of: list[list[Placement]],
    *,
    tile_rows: int,
    slack: int = 3,
) -> SpanList:
    """The requests of a prefill scene as tiles of at most ``tile_rows`` rows."""
    tiles = [
        (len(rows[i : i + tile_rows]), request)
        for request, rows in enumerate(rows_of)
        for i in range(0, len(rows), tile_rows)
    ]
    spans = [*chain(*spans_of)]
    masks = _Masks()
    device = scene.shape.device
    return SpanList(
        num_tiles=_int32([len(tiles)], 0, device),
        tile_row_indptr=_int32([0, *accumulate(size for size, _ in tiles)], slack, device),
        tile_request=_int32([request for _, request in tiles], slack, device),
        request_span_indptr=_int32([0, *accumulate(map(len, spans_of))], slack, device),
        span_page_indptr=_int32(
            [0, *accumulate(len(s.segment.pages) for s in spans)], slack, device
        ),
        span_offset=_int32([s.offset for s in spans], slack, device),
        span_length=_int32([s.segment.length for s in spans], slack, device),
        span_explicit=_int32([int(s.segment.explicit) for s in spans], slack, device),
        span_mask=_int32([masks.first_word(s) for s in spans], slack, device),
        page_indices=_int32([*chain(*(s.segment.pages for s in spans))], slack, device),
        mask_words=_int32(masks.words, 0, device),
        row_positions=_int32(scene.row_positions, slack, device),
    )


def in_units(
    spans: SpanList, num_kv_heads: int, costs: UnitCosts | None, groups: int = 2
) -> SpanList:
    """``spans`` (without slack) with the units of its tiles for ``groups`` per program, split by
    ``costs`` if given."""
    arrays = {
        name: value.cpu().numpy()
        for name, value in vars(spans).items()
        if isinstance(value, torch.Tensor)
    }
    units, num_states = span_units(arrays, num_kv_heads, costs)
    device = spans.num_tiles.device
    unit_tensors = {name: torch.from_numpy(array).to(device) for name, array in units.items()}
    return replace(
        spans,
        **unit_tensors,
        parts=spans.parts,
        complete=spans.complete,
        num_states=num_states,
        groups=groups,
        value_start=spans.value_start,
    )


def _items(
    scene: Scene, grouped: bool, pages_per_item: int | None
) -> list[tuple[Segment, int, list[int], list[Reading]]]:
    readers: dict[int, list[Reading]] = {}
    for reading in scene.readings:
        readers.setdefault(id(reading.placement.segment), []).append(reading)
    items = []
    for segment_readings in readers.values():
        segment = segment_readings[0].placement.segment
        heads = [(-1, list(range(len(segment.pages))))]
        if segment.selected is not None:
            heads = list(enumerate(segment.selected))
        for head, ordinals in heads:
            step = pages_per_item or max(1, len(ordinals))
            for i in range(0, len(ordinals), step):
                for item_readings in (
                    [segment_readings] if grouped else [[reading] for reading in segment_readings]
                ):
                    items.append((segment, head, ordinals[i : i + step], item_readings))
    return items


class _Masks:
    """Bitmaps over frame positions, one per placement with hidden positions."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.first: dict[int, int] = {}

    def first_word(self, placement: Placement) -> int:
        if not placement.hidden:
            return -1
        if id(placement) not in self.first:
            self.first[id(placement)] = len(self.words)
            words = [0] * (-(-placement.segment.length // 32))
            for position in placement.hidden:
                words[position // 32] |= 1 << position % 32
            self.words += [word - 2**32 if word >= 2**31 else word for word in words]
        return self.first[id(placement)]


def _int32(values: list[int], slack: int, device: str) -> Tensor:
    return torch.tensor(values + [GARBAGE] * slack, dtype=torch.int32, device=device)


def planned(work: WorkList, tile: Tile) -> WorkList:
    """All items of ``work`` in one tile, in the form of a planner's launch."""
    arrays = {
        name: value.cpu().numpy()
        for name, value in vars(work).items()
        if isinstance(value, torch.Tensor)
    }
    device = work.num_items.device
    item_numbers, entry_numbers = (
        torch.from_numpy(x).to(device) for x in unit_numbers(arrays).values()
    )
    indptr = torch.cat([torch.zeros_like(work.num_items), work.num_items])
    return replace(
        work,
        tile_indptr=indptr,
        tiles=(tile,),
        item_numbers=item_numbers,
        entry_numbers=entry_numbers,
    )
