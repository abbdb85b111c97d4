"""Work lists of decode rows: written when the rows change, advanced in place by every step.

From one decode step to the next every position rises by one, and every tail has one more key. So a
step rewrites positions and bounds, and sometimes adds a page, for which tails have spare room.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from looseleaf.attention.plan.groups import DecodeRow, Groups, Item, tail_items
from looseleaf.attention.plan.lists import make_work_list

# pages that a tail can grow before the lists are rewritten
_ROOM = 16


class DecodeLists:
    """The lists of ``rows``, grouped as ``groups``, in items of at most ``split_keys`` keys.

    ``split_keys`` is a multiple of ``page_size``; a tail's last item may grow past it. With
    ``invariant`` all cuts of a segment are at multiples of it, in every grouping.
    """

    def __init__(
        self,
        rows: Sequence[DecodeRow],
        groups: Groups,
        *,
        page_size: int,
        split_keys: int,
        invariant: bool = False,
    ) -> None:
        self.groups = groups
        most = split_keys // page_size
        split = _split_at_multiples if invariant else _split_item
        settled = [part for item in groups.items for part in split(item, most)]
        tails = [split(item, most) for item in tail_items(rows, groups)]
        items = [*settled, *(part for tail in tails for part in tail)]
        last_items = _last_items(len(settled), tails)
        for index in last_items:
            items[index] = _with_room(items[index])
        self.work = make_work_list(items, rows, page_size=page_size, device=torch.device("cpu"))
        self._positions = self.work.row_positions.numpy()
        self._bounds = self.work.entry_bound.numpy()
        self._pages = self.work.page_indices.numpy()
        # tails have one entry an item, and follow all other items
        parts = [len(tail) for tail in tails]
        self._tail_bounds = self._bounds[len(self._bounds) - sum(parts) :]
        self._tail_row = np.repeat(np.arange(len(rows)), parts)
        starts = self.work.item_page_indptr.numpy()
        stops = [int(starts[index + 1]) for index in last_items]
        self._known = [len(row.tail.pages) for row in rows]
        # page p of a row's tail is at p plus this in page_indices
        self._base = [stop - _ROOM - known for stop, known in zip(stops, self._known, strict=True)]
        self._limit = [known + _ROOM for known in self._known]

    def move_to(self, rows: Sequence[DecodeRow]) -> bool:
        """Advance the lists to ``rows``, the same rows one step on; False if a tail outgrew its
        room.
        """
        lengths = []
        for index, row in enumerate(rows):
            tail = row.tail
            lengths.append(tail.length)
            count = len(tail.pages)
            if count != self._known[index]:
                if count > self._limit[index]:
                    return False
                first, base = self._known[index], self._base[index]
                self._pages[base + first : base + count] = tail.pages[first:]
                self._known[index] = count
        self._positions[:] = [row.position for row in rows]
        self._tail_bounds[:] = np.asarray(lengths)[self._tail_row]
        return True


def _split_item(item: Item, max_pages: int) -> list[Item]:
    """``item`` cut along its keys into near-equal runs of at most ``max_pages`` pages."""
    pages = len(item.pages)
    parts = -(-pages // max_pages)
    if parts <= 1:
        return [item]
    bounds = [pages * n // parts for n in range(parts + 1)]
    return [
        replace(item, pages=item.pages[a:b], first_page=item.first_page + a)
        for a, b in pairwise(bounds)
    ]


def _split_at_multiples(item: Item, step: int) -> list[Item]:
    """``item`` cut at multiples of ``step`` pages of its segment, wherever the item begins."""
    start, stop = item.first_page, item.first_page + len(item.pages)
    inner = range((start // step + 1) * step, stop, step)
    bounds = [0, *(cut - start for cut in inner), len(item.pages)]
    return [replace(item, pages=item.pages[a:b], first_page=start + a) for a, b in pairwise(bounds)]


def _last_items(before: int, tails: Sequence[Sequence[Item]]) -> list[int]:
    """The index of every tail's last item, where ``before`` items precede them all."""
    ends = before + np.cumsum([len(parts) for parts in tails])
    return [int(end) - 1 for end in ends]


def _with_room(item: Item) -> Item:
    # padding may be any page: the bound hides it
    return replace(item, pages=[*item.pages, *[item.pages[-1]] * _ROOM])
