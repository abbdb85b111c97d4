"""Scores of pages and the choice of the largest: the kernels answer to the references."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from looseleaf.ops.page_scores import LayerRules, page_scores
from looseleaf.ops.partial_attention import WorkList
from looseleaf.ops.select_pages import CandidateList, ChosenPages, PageScores, select_pages
from looseleaf.ops.store_kv import NewRows
from looseleaf.types import ScoreRule
from looseleaf_lab.testing.candidates import (
    NUM_KV_HEADS,
    UNWRITTEN,
    candidate_list,
    room_for,
    room_for_windows,
)
from looseleaf_lab.testing.scene import rotation_table

WRITTEN = (
    "item_page_indptr", "page_indices", "page_positions",
    "entry_offset", "entry_bound", "entry_mask",
)  # fmt: skip


def assert_written(mine: Tensor, expected: Tensor) -> None:
    """The same wherever something must be written; what a place has room for besides is free."""
    assert torch.equal(mine[expected != UNWRITTEN], expected[expected != UNWRITTEN])


def random_scores(seed: int, candidates: CandidateList) -> Tensor:
    """Scores with ties, of both signs, some of them infinite."""
    generator = torch.Generator().manual_seed(seed)
    rows, most = candidates.pages.shape
    scores = torch.randn(rows, NUM_KV_HEADS, most, generator=generator)
    scores = torch.where(scores.abs() < 0.8, (scores * 4).round() / 4, scores * 10)
    special = torch.rand(scores.shape, generator=generator)
    return scores.masked_fill(special < 0.1, -torch.inf).masked_fill(special > 0.95, torch.inf)


@pytest.mark.parametrize(
    ("seed", "rows", "most", "spans", "run"),
    [(0, 3, 5, 1, 1), (1, 3, 70, 3, 4), (2, 2, 300, 5, 8), (3, 3, 130, 1, 2)],
)
def test_the_kernel_chooses_what_the_reference_does(
    seed: int, rows: int, most: int, spans: int, run: int
) -> None:
    candidates = candidate_list(seed, rows, most, spans)
    scores = random_scores(seed, candidates)
    mine, other = (room_for(candidates, most, 7) for _ in range(2))
    for into, how in ((mine, "triton"), (other, "reference")):
        given = PageScores.of(scores, candidates, run)
        select_pages(given, candidates, into, implementation=how)  # type: ignore[arg-type]
    for name in WRITTEN:
        assert_written(getattr(mine.work, name), getattr(other.work, name))


@pytest.mark.parametrize("forced", [0, 7, 60, 400])
@pytest.mark.parametrize(("spans", "run"), [(1, 2), (3, 4), (1, 8)])
def test_few_of_many_are_chosen_in_little_room(spans: int, run: int, forced: int) -> None:
    """More runs are looked at than there is room for pages; what must be chosen comes first, and
    of more than are wanted the earliest."""
    given = candidate_list(6, 4, 400, spans)
    candidates = replace(given, limit=given.limit.clamp_max(20))
    scores = torch.randn(4, NUM_KV_HEADS, 400, generator=torch.Generator().manual_seed(6))
    order = torch.rand(400, generator=torch.Generator().manual_seed(7)).argsort()
    scores[:, :, order[:forced]] = torch.inf
    mine, other = (room_for(candidates, 20, 3) for _ in range(2))
    for into, how in ((mine, "triton"), (other, "reference")):
        found = PageScores.of(scores, candidates, run)
        select_pages(found, candidates, into, implementation=how)  # type: ignore[arg-type]
    for name in WRITTEN:
        assert_written(getattr(mine.work, name), getattr(other.work, name))


@pytest.mark.parametrize(("rows", "most", "spans", "window"), [(3, 40, 1, 2), (4, 90, 3, 5)])
def test_earlier_rows_read_what_is_new_to_them(
    rows: int, most: int, spans: int, window: int
) -> None:
    """And what is read is marked, but for a step that is made again: kernels and references."""
    candidates = candidate_list(rows, rows, most, spans)
    scores = random_scores(rows, candidates)
    made = {}
    for how in ("triton", "reference"):
        into, seen = room_for_windows(candidates, most + 1, 7, window)
        given = PageScores.of(scores, candidates, 4)
        select_pages(given, candidates, into, seen, how)  # type: ignore[arg-type]
        made[how] = into, seen
    mine, other = (made[how] for how in ("triton", "reference"))
    for name in WRITTEN:
        assert_written(getattr(mine[0].work, name), getattr(other[0].work, name))
    for name in ("registers", "booked", "chosen"):
        assert torch.equal(getattr(mine[1], name), getattr(other[1], name)), name


def test_an_earlier_row_reads_a_page_once_and_the_newest_every_time() -> None:
    """Three steps that choose the same pages: the row before has seen them all."""
    candidates = candidate_list(0, 2, 30, 1)
    into, seen = room_for_windows(candidates, 31, 4, 2)
    seen.registers.zero_()
    seen.newly_sealed.zero_()
    scores, read = random_scores(0, candidates), []
    for step in range(3):
        into.work.row_positions.fill_(200 + step)
        select_pages(PageScores.of(scores, candidates, 1), candidates, into, seen, "reference")
        count = len(chosen(into.work, into, 0))
        read.append((count, int((seen.chosen[:count] & 1 == 0).sum())))
    assert read == [(read[0][0], read[0][0]), (read[0][0], 0), (read[0][0], 0)]
    assert read[0][0] > 0


def chosen(work: WorkList, into: ChosenPages, place: int) -> list[tuple[int, int, int]]:
    """Page, place in its frame and offset of what stands in the items of one row and KV head."""
    found = []
    indptr = work.item_page_indptr.tolist()
    for n in range(into.num_items):
        item = place * (into.num_items + 1) + n
        entry = (place * into.num_items + n) * into.window
        for page in range(indptr[item], indptr[item + 1]):
            at = work.page_indices[page], work.page_positions[page], work.entry_offset[entry]
            found.append(tuple(int(number) for number in at))
    return found  # type: ignore[return-value]


def test_the_pages_of_all_items_are_the_chosen_ones_each_in_its_span() -> None:
    candidates = candidate_list(3, 3, 60)
    scores = random_scores(3, candidates)
    into = room_for(candidates, 60, 9)
    given = PageScores.of(scores, candidates, 1)
    select_pages(given, candidates, into, implementation="reference")
    for row in range(2):
        for head in range(NUM_KV_HEADS):
            count, limit = int(candidates.num_pages[row]), int(candidates.limit[row])
            own = scores[row, head, :count].tolist()
            order = sorted(range(count), key=lambda n: (-own[n], n))[:limit]
            kept = sorted(n for n in order if own[n] > -torch.inf)
            expected = [
                (
                    int(candidates.pages[row, n]),
                    int(candidates.starts[row, n]),
                    int(candidates.span_offset[row, candidates.spans[row, n]]),
                )
                for n in kept
            ]
            assert chosen(into.work, into, row * NUM_KV_HEADS + head) == expected


@pytest.mark.parametrize(("two", "spans"), [(False, 3), (True, 3), (True, 1)])
@pytest.mark.parametrize("window", [0, 200])
def test_the_kernel_scores_as_the_reference_does(two: bool, spans: int, window: int) -> None:
    candidates = candidate_list(4, 3, 70, spans)
    generator = torch.Generator().manual_seed(4)
    dim = 32
    vectors = torch.randn(64, NUM_KV_HEADS, dim * (1 + two), generator=generator)
    q = torch.randn(3, 3 * NUM_KV_HEADS, dim, generator=generator)
    frequencies = 1.0 / 100 ** (torch.arange(0, dim, 2) / dim)
    rotation = rotation_table(frequencies.double(), 1200, False)
    positions = torch.tensor([900, 1100, 40], dtype=torch.int32)
    rules = LayerRules(rotation, ScoreRule(0.3, window=window), 16)
    # rows of the step are stored on the way; one of them pads
    k, v = torch.randn(2, 5, NUM_KV_HEADS, dim, generator=generator)
    slots, pages = torch.tensor([3, 64, -1, 17, 40]), torch.zeros(2, 2, 5, NUM_KV_HEADS, 16, dim)
    mine, other = (
        page_scores(
            q, vectors, candidates, positions, rules, 8,
            NewRows(k, v, torch.tensor([5, 900, 0, 7, 31]), slots, *pages[n]), implementation,
        )
        for n, implementation in enumerate(("triton", "reference"))
    )  # fmt: skip
    assert torch.allclose(*pages, atol=1e-5)
    assert (pages[0].abs().sum((0, 2, 4)) > 0).sum() == 4
    for row in range(int(candidates.num_rows)):
        count = int(candidates.num_pages[row])
        mine_each, other_each = (some.each[row, :, :count] for some in (mine, other))
        assert torch.allclose(mine_each, other_each, atol=1e-4)
        assert (mine_each[:, 0] == torch.inf).all() or window
        runs = -(-count // 8)
        maxima = (some.maxima[row, :, :runs] for some in (mine, other))
        assert torch.allclose(*maxima, atol=1e-4)


def test_a_row_without_enough_visible_pages_chooses_fewer() -> None:
    candidates = replace(candidate_list(5, 2, 20, 1), limit=torch.tensor([9, 9], dtype=torch.int32))
    scores = torch.full((2, NUM_KV_HEADS, 20), -torch.inf)
    scores[:, :, 4] = -3.0
    into = room_for(candidates, 20, 5)
    for implementation in ("reference", "triton"):
        given = PageScores.of(scores, candidates, 4)
        select_pages(given, candidates, into, implementation=implementation)  # type: ignore[arg-type]
        assert len(chosen(into.work, into, 0)) == 1
