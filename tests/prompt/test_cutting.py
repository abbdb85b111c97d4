"""Cuts by contents: pieces cover a text, keep to messages, and are the same at any place."""

import random

import numpy as np
import pytest

from looseleaf.prompt.cutting import Cutter

MARKER, LINE_END, SIZE = 0, 1, 64


def cutter(**limits: int) -> Cutter:
    ids = np.arange(SIZE)
    sizes = {"min_tokens": 8, "max_tokens": 64, "lines_per_cut": 3, "window": 4, **limits}
    return Cutter(ids == MARKER, ids == LINE_END, **sizes)


def lines(seed: int, count: int) -> tuple[int, ...]:
    """Lines of 2 to 9 tokens."""
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(count):
        ids += [rng.randrange(2, SIZE) for _ in range(rng.randint(1, 8))] + [LINE_END]
    return tuple(ids)


def texts(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[piece.start : piece.stop] for piece in cutter().cut(tokens)]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_all_tokens_but_markers_and_keep_their_bounds(seed: int) -> None:
    tokens = (*lines(seed, 40), MARKER, *lines(seed + 100, 3), MARKER, MARKER, *lines(seed, 9))
    pieces = cutter().cut(tokens)
    covered = [n for piece in pieces for n in range(piece.start, piece.stop)]
    assert covered == [n for n, token in enumerate(tokens) if token != MARKER]
    assert all(piece.num_tokens <= 64 for piece in pieces)


@pytest.mark.parametrize("seed", range(5))
def test_a_text_has_the_same_pieces_after_another_text(seed: int) -> None:
    text, before = lines(seed, 80), lines(seed + 50, 13)
    own, moved = texts(text), set(texts((*before, *text)))
    assert sum(len(piece) for piece in own if piece in moved) >= 0.7 * len(text)
    assert texts((*before, MARKER, *text))[-len(own) :] == own


def test_an_edit_changes_the_pieces_around_it_only() -> None:
    text = lines(3, 120)
    edited = (*text[:300], 7, 9, 11, *text[302:])
    kept = set(texts(edited))
    assert sum(len(piece) for piece in texts(text) if piece in kept) >= 0.7 * len(text)


def test_a_text_without_line_ends_is_cut_at_the_largest_size() -> None:
    assert [piece.num_tokens for piece in cutter().cut((5,) * 150)] == [64, 64, 22]
