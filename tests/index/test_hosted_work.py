"""Hosted reads done in C by waiting threads: beside the ones that PyTorch does."""

import ctypes
import gc
import threading
import time
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from looseleaf.config import IndexConfig
from looseleaf.index import Heads, build_segment
from looseleaf.index.host.attend import HostedAttention, HostedCounters, HostedRead
from looseleaf.index.host.segment import HostedSegment
from looseleaf.index.host.work import HostedWork, PlaceTables
from looseleaf.index.host_threads import HostThreads
from looseleaf.kv.keys import SegmentKey
from looseleaf.types import Rotation, ScoreRule
from looseleaf_lab.testing.scene import rotation_table
from tests.index.vectors import layer as make_layer

LAYERS, HEADS, KV_HEADS, DIM = 2, 6, 2, 32
RULES = (ScoreRule(DIM**-0.5), ScoreRule(0.3))
CREW = 3


def segment_of(
    num_tokens: int, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> HostedSegment:
    segment = HostedSegment.empty(
        SegmentKey(bytes([seed]) * 32), num_tokens,
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype,
    )  # fmt: skip
    for layer in range(LAYERS):
        queries = []
        for head in range(KV_HEADS):
            keys, asked = make_layer(num_tokens, 64, DIM, seed + 10 * layer + head)
            segment.kv[layer, 0, head] = keys
            queries += [asked[:, :]] * (HEADS // KV_HEADS)
        segment.kv[layer, 1].normal_(generator=torch.Generator().manual_seed(seed))
        segment.queries_of.append(torch.stack(queries))
    config = IndexConfig(kind, sink=4, local=12, degree=8, top=20, **options)  # type: ignore[arg-type]
    segment.index = build_segment(segment, num_tokens, Heads(LAYERS, HEADS, KV_HEADS), config)
    return segment


def rotations(interleaved: bool = False, rotary_dim: int = DIM) -> list[Rotation]:
    """A table for every layer, no two alike."""
    exponents = torch.arange(0, rotary_dim, 2).double() / rotary_dim
    return [rotation_table(100.0**-exponents / (1 + n), 4000, interleaved) for n in range(LAYERS)]


def work_of(rows: int, dtype: torch.dtype = torch.float32, turns: Any = None) -> HostedWork:
    q = torch.zeros(rows, HEADS, DIM, dtype=dtype)
    return HostedWork(HostThreads(CREW), PlaceTables(HEADS), turns or rotations(), RULES, q)


def states(work: HostedWork, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
    work.q[: len(q)] = q
    work.run(layer)
    out, lse = work.parts()
    return out[: len(q)], lse[: len(q)]


@pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
@pytest.mark.parametrize("keys", ["stored", "int8"])
@pytest.mark.parametrize("shape", [(False, DIM), (True, DIM), (False, DIM // 2)])
def test_the_threads_read_what_pytorch_does(kind: str, keys: str, shape: Any) -> None:
    turns = rotations(*shape)
    one, two = segment_of(500, kind, keys=keys), segment_of(300, kind, 3, keys=keys)
    dense = frozenset({1})
    reads = [
        (HostedRead(one, 7, 30),),
        (),
        (HostedRead(one, 7, 30), HostedRead(two, 600, 25, dense), HostedRead(two, 1000)),
    ]
    positions = [600, 9, 1500]
    oracle = HostedAttention(turns, sample=0.0)
    work = work_of(4, turns=turns)
    q = torch.randn(3, HEADS, DIM, generator=torch.Generator().manual_seed(5))
    work.load(positions, reads)
    for layer in range(LAYERS):
        expected = oracle.decode(layer, q, positions, reads, RULES[layer])
        out, lse = states(work, layer, q)
        torch.testing.assert_close(lse, expected.lse, rtol=0, atol=2e-5)
        torch.testing.assert_close(out[::2], expected.out[::2], rtol=0, atol=2e-5)
    counted = HostedCounters()
    work.collect(counted)
    assert counted.reads == oracle.counters.reads
    assert counted.keys_read == oracle.counters.keys_read
    assert counted.keys_scanned == oracle.counters.keys_scanned


@pytest.mark.parametrize("keys", ["stored", "int8"])
def test_the_threads_estimate_what_pytorch_does(keys: str) -> None:
    plain = segment_of(500, "ivf", keys=keys)
    segment = segment_of(500, "ivf", keys=keys, estimate=True)
    work, oracle = work_of(1), HostedAttention(rotations(), sample=0.0)
    q = 0.3 * torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(5))
    for count in (1, 20, 470, 484):
        reads = [(HostedRead(segment, 7, count),)]
        work.load([600], reads)
        expected = oracle.decode(0, q, [600], reads, RULES[0])
        out, lse = states(work, 0, q)
        torch.testing.assert_close(lse, expected.lse, rtol=0, atol=2e-5)
        torch.testing.assert_close(out, expected.out, rtol=0, atol=2e-5)
        found = oracle.decode(0, q, [600], [(HostedRead(plain, 7, count),)], RULES[0])
        assert torch.allclose(found.lse, lse, atol=1e-3) == (count == 484)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_queries_and_keys_are_read_as_they_are(dtype: torch.dtype) -> None:
    segment = segment_of(400, "graph", dtype=dtype)
    reads = [(HostedRead(segment, 3, 20),)]
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    work = work_of(1, dtype)
    work.load([450], reads)
    expected = HostedAttention(rotations(), sample=0.0).decode(0, q, [450], reads, RULES[0])
    out, lse = states(work, 0, q)
    torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse, expected.lse, rtol=0, atol=1e-4)


def test_a_later_step_moves_on_and_rows_that_left_read_nothing() -> None:
    segment = segment_of(400, "graph")
    read = HostedRead(segment, 3, 20)
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    work, oracle = work_of(2), HostedAttention(rotations(), sample=0.0)
    for positions, reads in (
        ([450, 460], [(read,), (read,)]),
        ([451, 461], [(read,), (read,)]),
        ([452], [(read,)]),
        ([453, 10], [(), (HostedRead(segment, 0, 5),)]),
    ):
        work.load(positions, reads)
        some = q[: len(positions)]
        out, lse = states(work, 1, some)
        expected = oracle.decode(1, some, positions, reads, RULES[1])
        torch.testing.assert_close(lse, expected.lse, rtol=0, atol=2e-5)
        read_rows = [bool(several) for several in reads]
        torch.testing.assert_close(out[read_rows], expected.out[read_rows], rtol=0, atol=2e-5)
        empty = work.states[-2 * HEADS :].view(2, HEADS)[len(positions) :]
        assert torch.isneginf(empty).all()


def test_a_segment_that_nobody_reads_any_more_is_let_go() -> None:
    segment, work = segment_of(300, "flat"), work_of(1)
    work.load([310], [(HostedRead(segment, 0, 10),)])
    assert work.holds(segment)
    gone = ref(segment)
    work.load((), ())
    assert not work.holds(segment)
    del segment
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["flat", "graph"])
def test_recall_is_measured_of_the_sampled_read(kind: str) -> None:
    segment = segment_of(2000, kind)
    if kind == "graph":
        assert segment.index is not None
        for index in segment.index.units.values():
            index.effort = 20
    work, counters = work_of(1), HostedCounters()
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(3))
    for step in range(8):
        work.load([2100], [(HostedRead(segment, 3, 20),)], (step, step))
        for layer in range(LAYERS):
            states(work, layer, q)
    work.collect(counters)
    assert counters.sampled == 1 and counters.recall is not None
    assert counters.recall == 1.0 if kind == "flat" else 0 < counters.recall < 1


def test_calls_from_any_thread_do_every_unit_once() -> None:
    segment = segment_of(300, "flat")
    work = work_of(1)
    work.load([310], [(HostedRead(segment, 0, 10),)])
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    expected = [part.clone() for part in states(work, 0, q)]

    def call() -> None:
        for _ in range(200):
            found = states(work, 0, q)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    counters = HostedCounters()
    work.collect(counters)
    assert counters.keys == 601 * HEADS * 300


def test_a_word_in_memory_has_a_layer_done() -> None:
    segment = segment_of(300, "flat")
    work = work_of(1)
    work.load([310], [(HostedRead(segment, 0, 10),)])
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    expected = [part.clone() for part in states(work, 0, q)]
    bell = torch.zeros(16, dtype=torch.int64)
    settled: list[bool] = []
    at = work.crew.listen(bell, lambda: settled.append(True))
    done = ctypes.c_uint32.from_address(at.reply)
    for _ in range(20):
        work.states.zero_()
        ctypes.c_uint64.from_address(at.request).value = ctypes.addressof(work.layers[0])
        until = time.monotonic() + 10
        while not done.value and time.monotonic() < until:
            pass
        assert done.value == 1 and not bell[0]
        done.value = 0
        assert all(torch.equal(a, b) for a, b in zip(work.parts(), expected, strict=True))
    assert not settled
    del work
    gc.collect()
    assert settled == [True]
