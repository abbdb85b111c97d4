"""What requests launch on a card was launched while it warmed up, as far as the plans tell: they
are made by the host, here with the costs of a card that is not there."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.cost_model import default_cost_model
from looseleaf.attention.plan.groups import ReadSpan
from looseleaf.attention.plan.host_spans import HostSpans
from looseleaf.attention.plan.planner import Planner
from looseleaf.engine.runner import warmup as warming
from looseleaf.graphs.decode import MAX_ROWS, StepGraphs, padded_rows
from looseleaf.graphs.prefill import PassGraphs
from looseleaf.kv.pool import PagePool
from looseleaf.types import ScoreRule
from looseleaf_lab.testing.scene import rotation_table

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
COSTS = default_cost_model(DIM, 2, 132, hopper=True)
# documents, tokens of each, tokens of the question
SIZES = [(6, 512, 64), (5, 4096, 64), (3, 512, 16), (12, 512, 200), (2, 128, 600), (1, 512, 64)]


def prompt(size: tuple[int, int, int], again: str | float = 0.0) -> PrefillChunk:
    """A question behind documents, of which the first 16 tokens of each or a share are replaced."""
    number, length, question = size
    total, rng = number * length, np.random.default_rng(0)
    places = np.arange(length, total)
    chosen = places % length < 16 if again == "first" else rng.random(len(places)) < again
    places = places[chosen]
    spans = []
    for start in range(0, total, length):
        own = places[(places >= start) & (places < start + length)] - start
        hidden = warming._bitmap(own, length) if len(own) else None
        spans.append(ReadSpan(range(length // PAGE), start, length, length // PAGE, hidden))
    spans.append(ReadSpan(range(-(-question // PAGE)), total, question, 0))
    if len(places):
        pages = range(-(-len(places) // PAGE))
        spans.append(ReadSpan(pages, 0, len(places), 0, places=places))
    return PrefillChunk(np.concatenate([places, np.arange(total, total + question)]), tuple(spans))


def make_attention() -> PagedAttention:
    pool = PagePool(
        num_pages=1, page_size=PAGE, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    rotation, rules = rotation_table(torch.ones(DIM // 2), 1, False), (ScoreRule(DIM**-0.5),)
    return PagedAttention(pool, (rotation,), rules, HEADS, implementation="reference", costs=COSTS)


@pytest.mark.parametrize("size", SIZES)
def test_few_new_rows_of_several_requests_are_read_by_the_kernels_of_usual_steps(
    size: tuple[int, int, int],
) -> None:
    graphs: Any = object.__new__(StepGraphs)
    attention = graphs.attention = make_attention()
    graphs.max_num_seqs = 64
    usual = {(key.rows, key.works[0].tiles) for key in graphs.usual()}
    for requests in range(1, 9):
        rows = padded_rows(min(requests * size[2], MAX_ROWS))
        step = attention.host_step((), [prompt(size)] * requests, rows)
        # so many are read by spans
        assert step is None or (rows, step.works[0].work.tiles) in usual, requests


@pytest.mark.parametrize("heads", [(32, 8), (24, 8), (16, 16), (64, 8)])
def test_turns_of_a_chat_are_replayed_by_passes_that_warming_up_has_captured(
    heads: tuple[int, int],
) -> None:
    """Whatever is cached in front of them, as one text or as documents."""
    passes: Any = object.__new__(PassGraphs)
    passes.attention = attention = make_attention()
    passes.has_units = True
    attention.planner = Planner(
        PAGE, *heads, torch.device("cuda"), COSTS, finishing=True, gathering=True
    )
    captured, replayed = set(warming.usual_passes(passes, PAGE)), 0
    # each takes a tenth of a second or two
    assert len(captured) <= 30
    for rows in (1, *range(8, 520, 8)):
        for documents, length in (
            (0, 1), (1, 512), (1, 2000), (1, 6000), (1, 30_000), (6, 512), (5, 4096),
        ):  # fmt: skip
            chunks = [prompt((documents, length, rows))]
            if passes.sooner(chunks):
                replayed += 1
                assert passes.key_of(chunks) in captured, (documents, length, rows)
    assert replayed > 200


class Kind(NamedTuple):
    """What of a list the kernel that reads it is compiled for."""

    masked: bool
    groups: int
    gathered: bool
    cut: bool

    @classmethod
    def of(cls, spans: HostSpans) -> "Kind":
        masked = "row_patch_bounds" in spans.arrays
        return cls(masked, spans.groups, spans.num_gathered > 0, spans.num_states > 0)


class Listing(Planner):
    """Span lists that stay on the host, and of which kinds they were."""

    def span_list(self, chunks: Sequence[PrefillChunk], **how: Any) -> Any:
        self.kinds.add(Kind.of(self.host_spans(chunks, **how)))

    @cached_property
    def kinds(self) -> set[Kind]:
        return set()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listing]:
    """A planner for a card, whose lists are those of warming up so far."""
    planner = Listing(
        PAGE, HEADS, KV_HEADS, torch.device("cuda"), COSTS, finishing=True, gathering=True
    )
    step = SimpleNamespace(state=lambda *_: None)
    monkeypatch.setattr(warming, "ChunkStep", lambda *_: step)
    attention = make_attention()
    attention.planner = planner
    rows = warming._LONG
    pages, again = range(rows // PAGE), np.arange(1, rows, 2)
    patch = ReadSpan(pages[: -(-len(again) // PAGE)], 0, len(again), 0, places=again)
    hidden = ReadSpan(pages, 0, rows, 0, warming._bitmap(again, rows))
    variants = (ReadSpan(pages, 0, rows, 0),), (hidden, patch)
    slots = torch.zeros(rows, dtype=torch.int64)
    warming._span_launches(attention, [rows, warming._SHORT[0]], variants, slots)
    yield planner


@pytest.mark.parametrize("again", [0.0, "first", 0.05, 0.15, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_span_lists_of_several_requests_are_of_kinds_that_warming_up_has_launched(
    warm: Listing, size: tuple[int, int, int], again: str | float
) -> None:
    for requests in range(1, 9):
        kind = Kind.of(warm.host_spans([prompt(size, again)] * requests))
        assert kind in warm.kinds, requests
