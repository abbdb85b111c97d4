"""Cuts of work-list items along their keys: at fixed positions, or into equal shares.

A launch has as many programs as are in flight; program p takes units (item, KV head) p, p + n, ….
Parts of one length need whole rounds of units, and a partial last round idles most programs. Equal
shares lay all keys side by side and cut at each program's share. A program's pieces are placed in
the list at its rounds."""

import numpy as np

from looseleaf.attention.plan.lists import BoolArray, FlatItems, IntArray, Pieces, indptr_of, ramp


def equal_shares(
    flat: FlatItems, chosen: BoolArray, programs: int, step: int
) -> tuple[Pieces, int] | None:
    """The ``chosen`` items in equal shares for ``programs`` programs of each KV head, and the
    number of rounds. Cuts are at multiples of ``step`` pages of an item. Programs without work in a
    round have empty pieces. None if an item has no pages or the keys are too few."""
    item = np.flatnonzero(chosen)
    pages = flat.num_pages[item].astype(np.int64)
    ends = np.cumsum(pages)
    if not len(item) or pages.min() == 0 or ends[-1] < programs * step:
        return None
    # the end of each share, rounded to a step of its item
    share_ends = ends[-1] * np.arange(1, programs) // programs
    end_item = np.searchsorted(ends, share_ends, "right")
    begins = ends - pages
    within = (share_ends - begins[end_item] + step // 2) // step * step
    cuts = np.minimum(begins[end_item] + within, ends[end_item])
    stops = np.unique(np.concatenate([ends, cuts]))
    starts = np.concatenate([[0], stops[:-1]])
    piece_item = np.searchsorted(ends, starts, "right")
    program = np.searchsorted(cuts, starts, "right")
    round_index = ramp(np.bincount(program, minlength=programs))
    rounds = int(round_index.max()) + 1
    slot = round_index * programs + program
    pieces = Pieces(*(np.zeros(int(slot.max()) + 1, np.int32) for _ in Pieces._fields))
    pieces.item[slot] = item[piece_item]
    pieces.first_page[slot] = starts - begins[piece_item]
    pieces.stop_page[slot] = stops - begins[piece_item]
    pieces.stop_entry[slot] = flat.num_entries[item[piece_item]]
    return pieces, rounds


def fixed_cuts(flat: FlatItems, entry_parts: IntArray, step: int) -> Pieces:
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
