"""Laws of gathered keys: reading them is reading the spans that they come from."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from looseleaf.attention.buffers.span_buffer import SpanBuffer
from looseleaf.attention.plan.chunks import PrefillChunk, host_spans
from looseleaf.attention.plan.cost_model import ReadBySpans, cost_model_of, default_cost_model
from looseleaf.attention.plan.gathered import gather_chunks, gathered_spans, read_by_spans
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.lists import send
from looseleaf.attention.plan.planner import Planner
from looseleaf.graphs.prefill import capacity_for
from looseleaf.ops.gather_kv import GATHERED_SIZE
from looseleaf.ops.prefill_attention import SpanList, prefill_attention
from looseleaf.types import AttnState, ScoreRule
from looseleaf_lab.testing.scene import rotation_table

CPU = torch.device("cpu")
SIZE = 16
HEADS, GROUP, DIM = 2, 2, 32
RULE = ScoreRule(DIM**-0.5)


class Prompts:
    """Requests over random pages: documents, some of whose tokens are replaced, and a text."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(200))
        generator = torch.Generator().manual_seed(seed)
        self.kv = torch.randn(2, 200, HEADS, SIZE, DIM, generator=generator, dtype=dtype)
        self.slot_positions = torch.full((200, SIZE), -1, dtype=torch.int32)
        self.rotation = rotation_table(0.9 ** torch.arange(DIM // 2).double(), 1000, False, dtype)

    def pages(self, length: int) -> list[int]:
        return [int(self.free.pop()) for _ in range(-(-length // SIZE))]

    def chunk(self, lengths: Sequence[int], share: float, text: int) -> PrefillChunk:
        spans, replaced, at = list[ReadSpan](), list[int](), 0
        for length in lengths:
            chosen = np.flatnonzero(self.rng.random(length) < share)
            bits = np.zeros(-(-length // 32) * 32, dtype=np.uint8)
            bits[chosen] = 1
            hidden = np.packbits(bits, bitorder="little").view(np.int32) if len(chosen) else None
            spans.append(ReadSpan(self.pages(length), at, length, 0, hidden))
            replaced += [at + int(place) for place in chosen]
            at += length
        if replaced:
            places = np.array(replaced)
            pages = self.pages(len(places))
            flat = torch.full((len(pages) * SIZE,), -1, dtype=torch.int32)
            flat[: len(places)] = torch.from_numpy(places)
            self.slot_positions[pages] = flat.view(-1, SIZE)
            spans.append(ReadSpan(pages, 0, len(places), 0, None, places))
        spans.append(ReadSpan(self.pages(text), at, text, 0))
        return PrefillChunk(np.array([*replaced, *range(at, at + text)]), tuple(spans))

    def attend(self, spans: SpanList, q: Tensor, how: str = "reference") -> AttnState:
        patch = self.slot_positions if spans.mask_words.numel() else None
        return prefill_attention(q, *self.kv, spans, self.rotation, RULE, patch, how)  # type: ignore[arg-type]


def listed(spans: HostSpans) -> SpanList:
    return SpanList(**send(spans.arrays, CPU), parts=spans.parts, complete=True)


def queries(chunks: Sequence[PrefillChunk], dtype: torch.dtype = torch.float64) -> Tensor:
    rows = sum(len(chunk.positions) for chunk in chunks)
    return torch.randn(rows, HEADS * GROUP, DIM, dtype=dtype)


def in_place(chunks: Sequence[PrefillChunk]) -> SpanList:
    return listed(host_spans(chunks, 8))


def gathered(chunks: Sequence[PrefillChunk]) -> HostSpans:
    found = gather_chunks(chunks, SIZE)
    assert found is not None
    return gathered_spans(found, 8)


documents = st.lists(st.integers(1, 150), max_size=4)


@given(st.integers(0, 2**31), documents, documents, st.floats(0, 1), st.integers(1, 40))
def test_gathered_keys_answer_as_those_in_place(
    seed: int, first: list[int], second: list[int], share: float, text: int
) -> None:
    prompts = Prompts(seed)
    chunks = [prompts.chunk(first, share, text), prompts.chunk(second, 0.0, text)]
    q = queries(chunks)
    expected = prompts.attend(in_place(chunks), q)
    found = prompts.attend(listed(gathered(chunks)), q)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


def test_kernels_gather_and_read_alike() -> None:
    prompts = Prompts(1, torch.float32)
    chunks = [prompts.chunk([40, 33, 100], 0.2, 21), prompts.chunk([], 0.0, 5)]
    q = queries(chunks, torch.float32)
    expected = prompts.attend(in_place(chunks), q)
    for how in ("triton", "cpu"):
        found = prompts.attend(listed(gathered(chunks)), q, how)
        torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)


def test_rows_of_a_later_part_read_what_is_before_them() -> None:
    """Keys behind the last row, which stand in the same spans, are not gathered."""
    prompts = Prompts(2)
    chunk = prompts.chunk([60], 0.0, 90)
    early = PrefillChunk(chunk.positions[:50], chunk.spans)
    q = queries([early])
    spans = gathered([early])
    assert spans.num_gathered == GATHERED_SIZE
    expected = prompts.attend(in_place([chunk]), torch.cat([q, queries([chunk])[50:]]))
    torch.testing.assert_close(prompts.attend(listed(spans), q).out, expected.out[:50])


def test_what_is_not_covered_once_is_read_in_place() -> None:
    prompts = Prompts(3)
    whole = prompts.chunk([60, 60], 0.0, 10)
    gap = PrefillChunk(whole.positions, whole.spans[1:])
    twice = PrefillChunk(whole.positions, (*whole.spans, whole.spans[0]))
    before = ReadSpan(whole.spans[0].pages, -3, 60, 0)
    early = PrefillChunk(whole.positions, (before, *whole.spans[1:]))
    assert gather_chunks([whole], SIZE) is not None
    for chunk in (gap, twice, early):
        assert gather_chunks([whole, chunk], SIZE) is None


def test_a_buffer_leaves_slots_past_the_list_alone() -> None:
    """A graph has room for more keys than a pass reads, and copies none for them."""
    prompts = Prompts(4)
    many, few = [prompts.chunk([150, 150], 0.3, 30)], [prompts.chunk([50], 0.0, 30)]
    buffer = SpanBuffer(capacity_for(gathered(many), 512), CPU)
    assert buffer.capacity.gathered > 330
    for chunks in (many, few):
        buffer.load(gathered(chunks))
        buffer.fetch()
        slots = buffer.spans.source_slots
        assert slots is not None
        used = -(-(int(chunks[0].positions[-1]) + 1) // GATHERED_SIZE) * GATHERED_SIZE
        assert (slots[:used] >= -1).all()
        assert (slots[used:] == -2).all()
    assert not buffer.capacity.holds(host_spans(few, 8))


def test_the_planner_gathers_where_it_pays() -> None:
    costs = default_cost_model(128, 2, 132, hopper=True)

    def pays(**changed: float) -> bool:
        read = ReadBySpans(512, 3000.0, 4.0, 4096, masked=False)
        return costs.worth_gathering(replace(read, **changed), 8)  # type: ignore[arg-type]

    assert pays()
    assert not pays(units=8, unit_borders=1.0)
    assert not pays(keys=60000)
    # behind six documents of 512 tokens: what lists take would be more than 144 rows win
    behind = {"unit_keys": 3136.0, "unit_borders": 7.0, "keys": 3136, "masked": True}
    assert pays(units=14 * 8, **behind)
    assert not pays(units=5 * 8, **behind)
    assert not cost_model_of(CPU, 128, 4).worth_gathering(ReadBySpans(512, 3e3, 4.0, 4096, True), 8)


def test_few_rows_that_cross_borders_often_are_read_by_one_group() -> None:
    costs = default_cost_model(128, 2, 132, hopper=True)
    # behind six documents of 512 tokens, some of which are replaced
    behind = ReadBySpans(5 * 8, 3136.0, 7.0, 3136, masked=True)
    assert costs.groups_for(behind) == 1
    assert costs.groups_for(replace(behind, masked=False)) == 2
    assert costs.groups_for(replace(behind, unit_keys=20480.0)) == 1
    # what can't be cut for so many programs
    assert costs.groups_for(replace(behind, units=15 * 8)) == 2
    assert default_cost_model(128, 4, 132, hopper=True).groups_for(behind) == 2


def test_programs_of_one_group_are_twice_as_many() -> None:
    """They share a multiprocessor by two, so what few rows read is cut for all of them."""
    chunk = Prompts(5).chunk([400] * 6, 0.03, 64)
    costs = default_cost_model(128, 2, 132, hopper=True)
    planner = Planner(SIZE, 32, 8, torch.device("cuda"), costs)
    one, two = (planner.host_spans([chunk], gather=False, groups=groups) for groups in (1, 2))
    for spans, most in ((one, 264), (two, 132)):
        assert spans.num_states > len(chunk.positions)
        assert 0.7 * most < 8 * spans.num_units <= most


@pytest.mark.parametrize("invariant", [False, True])
def test_tiles_of_one_group_have_half_as_many_rows(invariant: bool) -> None:
    chunk = Prompts(5).chunk([400] * 6, 0.02, 64)
    costs = default_cost_model(128, 2, 132, hopper=True)
    planner = Planner(SIZE, 32, 8, torch.device("cuda"), costs, batch_invariant=invariant)
    spans = planner.host_spans([chunk])
    rows = np.diff(spans.arrays["tile_row_indptr"])
    assert spans.groups == (2 if invariant else 1)
    assert rows.max() * 4 == 64 * spans.groups
    assert rows.sum() == len(chunk.positions)
    # a graph is made for one of them
    room = capacity_for(spans, 160)
    assert room.holds(spans) and not room.holds(spans._replace(groups=3 - spans.groups))


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_plans_gather_nothing(invariant: bool) -> None:
    """Whether it pays depends on the others of a step, and bits on whether it is done."""
    prompts = Prompts(5)
    chunks = [prompts.chunk([150] * 4, 0.0, 400)] * 4
    costs = default_cost_model(128, 2, 1, hopper=True)
    planner = Planner(SIZE, 4, 2, CPU, costs, batch_invariant=invariant, gathering=True)
    assert bool(planner.host_spans(chunks).num_gathered) is not invariant
    assert bool(planner.counters.gathered_keys) is not invariant
    read = read_by_spans(chunks, 8, 2)
    assert read.units == 4 * 50 * 2
    assert read.unit_borders == 4.0
