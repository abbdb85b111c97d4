"""Where the items of a work list are cut along their keys: at fixed places whoever reads them, or
so that all programs read equally much.

A launch has as many programs as are in flight, and each takes every so-manieth unit (item, KV
head). Items in parts of about one length are so many rounds of units, and most programs have
nothing to do in a last round that is not full. Here all keys are laid side by side and cut where a
program has its share; what a program reads stands in the list where its turns are."""

import numpy as np

from looseleaf.attention.plan.lists import BoolArray, FlatItems, IntArray, Pieces, indptr_of, ramp


def equal_shares(
    flat: FlatItems, chosen: BoolArray, programs: int, step: int
) -> tuple[Pieces, int] | None:
    """The ``chosen`` items, cut for ``programs`` of each KV head that take turns, at every ``step``
    pages of an item at most; and how many turns there are. Turns of programs that have no more to
    read are pieces of nothing. None if an item has no pages, or there is too little to share."""
    item = np.flatnonzero(chosen)
    pages = flat.num_pages[item].astype(np.int64)
    ends = np.cumsum(pages)
    if not len(item) or pages.min() == 0 or ends[-1] < programs * step:
        return None
    # where a share ends, at a step of the item that it ends in
    wanted = ends[-1] * np.arange(1, programs) // programs
    place = np.searchsorted(ends, wanted, "right")
    begins = ends - pages
    within = (wanted - begins[place] + step // 2) // step * step
    cuts = np.minimum(begins[place] + within, ends[place])
    stops = np.unique(np.concatenate([ends, cuts]))
    starts = np.concatenate([[0], stops[:-1]])
    of = np.searchsorted(ends, starts, "right")
    reader = np.searchsorted(cuts, starts, "right")
    turn = ramp(np.bincount(reader, minlength=programs))
    turns = int(turn.max()) + 1
    at = turn * programs + reader
    pieces = Pieces(*(np.zeros(int(at.max()) + 1, np.int32) for _ in Pieces._fields))
    pieces.item[at] = item[of]
    pieces.first_page[at] = starts - begins[of]
    pieces.stop_page[at] = stops - begins[of]
    pieces.stop_entry[at] = flat.num_entries[item[of]]
    return pieces, turns


def fixed_places(flat: FlatItems, entry_parts: IntArray, step: int) -> Pieces:
    """Cuts at multiples of ``step`` pages from the segment's first page."""
    stop = flat.first_page + flat.num_pages
    parts = np.maximum(-(-stop // step) - flat.first_page // step, 1)
    pieces = Pieces.cut(flat, parts, entry_parts)
    begin = flat.first_page[pieces.item]
    nth = (np.arange(len(pieces.item)) - indptr_of(parts * entry_parts)[pieces.item]) // (
        entry_parts[pieces.item]
    )
    cut = (begin // step + nth) * step - begin
    return pieces._replace(
        first_page=np.maximum(cut, 0).astype(np.int32),
        stop_page=np.minimum(cut + step, flat.num_pages[pieces.item]).astype(np.int32),
    )
