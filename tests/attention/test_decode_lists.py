"""Lists that are moved along say the same as lists that are written anew."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.attention.decode_lists import DecodeLists
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan, group_rows
from looseleaf.config import RopeConfig
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.rope.frames import build_rotation
from looseleaf.types import ScoreRule

PAGE_SIZE, NUM_PAGES = 16, 400
SHARED = list(range(40, 47))


def rows_at(step: int, starts: list[int], pages: list[list[int]]) -> list[DecodeRow]:
    """Rows behind one shared document, each at its own offset; tails grow in place, as an
    engine's do."""
    rows = []
    for index, start in enumerate(starts):
        length = start + step
        own = pages[index]
        while len(own) * PAGE_SIZE < length:
            own.append(100 + 37 * index + len(own))
        document = ReadSpan(SHARED, 3 * index, 7 * PAGE_SIZE - 5, 7)
        tail_offset = document.offset + document.length
        rows.append(
            DecodeRow(tail_offset + length - 1, (document,), ReadSpan(own, tail_offset, length, 0))
        )
    return rows


@settings(max_examples=15)
@given(
    starts=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    steps=st.lists(st.integers(1, 330), min_size=1, max_size=6),
    split_pages=st.integers(1, 8),
)
def test_moved_lists_read_what_new_ones_read(
    starts: list[int], steps: list[int], split_pages: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    pages = [torch.randn(NUM_PAGES, 1, PAGE_SIZE, 32, generator=generator) for _ in range(2)]
    q = torch.randn(len(starts), 2, 32, generator=generator)
    rotation, rule = build_rotation(RopeConfig(32, 32), 512), ScoreRule(0.2)

    def attended(lists: DecodeLists) -> torch.Tensor:
        states = partial_attention(q, *pages, lists.work, rotation, rule, implementation="native")
        return merge_states(states, lists.work.row_state_indptr).out

    held: list[list[int]] = [[] for _ in starts]
    rows = rows_at(0, starts, held)
    groups = group_rows(rows, grouping=True)
    split = split_pages * PAGE_SIZE
    moved = DecodeLists(rows, groups, page_size=PAGE_SIZE, split_keys=split)
    known = [len(own) for own in held]
    for step in sorted(steps):
        rows = rows_at(step, starts, held)
        fresh = DecodeLists(rows, groups, page_size=PAGE_SIZE, split_keys=split)
        if not moved.move_to(rows):
            # only a tail that has outgrown its room of sixteen pages may ask for new lists
            assert any(len(own) > first + 16 for own, first in zip(held, known, strict=True))
            return
        torch.testing.assert_close(attended(moved), attended(fresh))
