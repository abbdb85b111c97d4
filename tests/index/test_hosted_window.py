"""Rows of a window read on in hosted segments: beside sets of Python and plain attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf.index import search
from looseleaf.index.host.attend import HostedAttention, HostedCounters, HostedRead
from looseleaf.index.host.window import HostedWindow, WindowRow, WindowShape
from looseleaf.index.host.work import HostedWork
from looseleaf.ops.rotate import rotate
from tests.index.test_hosted_work import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    RULES,
    rotations,
    segment_of,
    work_of,
)

SHAPE = WindowShape(LAYERS, HEADS, DIM)
STEPS, FIRST = 9, 700
GROUP = HEADS // KV_HEADS


class Plain:
    """One output's rows in one layer, as RetroAttention says it: sets, and fp64."""

    def __init__(self, reads: tuple[HostedRead, ...], size: int, layer: int) -> None:
        self.reads, self.size, self.layer = reads, size, layer
        self.turns = rotations()
        # of a row and head what it has read, and its output times its total, its total
        self.seen: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.sums: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, q: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        """Outputs and lse of rows ``q``, newest first."""
        outs, lses = torch.zeros(len(q), HEADS, DIM), torch.zeros(len(q), HEADS)
        for head in range(HEADS):
            read = [
                (number, key)
                for number, each in enumerate(self.reads)
                for key in self._read_now(each, q[0, head], newest, head)
            ]
            for age, row in enumerate(q):
                at = newest - age, head
                seen = self.seen.setdefault(at, set())
                fresh = [one for one in read if one not in seen]
                if age:
                    # what is always read was read at the row's own step
                    assert all(self._indexed(*one) for one in fresh)
                seen.update(fresh)
                before = self.sums.get(at, (torch.zeros(DIM).double(), torch.zeros(1).double()))
                self.sums[at] = self._joined(before, row[head], newest - age, head, fresh)
                total, weight = self.sums[at]
                for number, each in enumerate(self.reads):
                    if each.index_at(self.layer) is None:
                        whole = [(number, key) for key in range(each.segment.num_tokens)]
                        both = (total, weight), row[head], newest - age, head, whole
                        total, weight = self._joined(*both)
                outs[age, head], lses[age, head] = total / weight, weight.log()
        return outs, lses

    def _indexed(self, number: int, key: int) -> bool:
        index = self.reads[number].index_at(self.layer)
        assert index is not None
        return key in index.indexed

    def _read_now(self, read: HostedRead, q: Tensor, newest: int, head: int) -> list[int]:
        """What the newest row reads, of a segment that has an index in this layer."""
        index = read.index_at(self.layer)
        if index is None:
            return []
        turned = self._turned(q, newest - read.offset)
        unit, want = index.at(self.layer, head), min(read.count, len(index.indexed))
        effort = round(unit.effort * max(1.0, want / index.config.top))
        ids = search(unit, turned.float()[None], want, effort).ids[0]
        found = [int(n) + index.indexed.start for n in ids if n >= 0]
        ends = [n for n in range(read.segment.num_tokens) if n not in index.indexed]
        return found + ends

    def _joined(
        self, before: Any, q: Tensor, position: int, head: int, keys: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        total, weight = before
        for number, read in enumerate(self.reads):
            own = [key for which, key in keys if which == number]
            if own:
                k, v = read.segment.kv[self.layer, :, head // GROUP, own].double()
                turned = self._turned(q, position - read.offset).double()
                shares = (k @ turned * RULES[self.layer].softmax_scale).exp()
                total, weight = total + shares @ v, weight + shares.sum()
        return total, weight

    def _turned(self, q: Tensor, place: int) -> Tensor:
        return rotate(q[None, None].float(), torch.tensor([place]), self.turns[self.layer])[0, 0]


def drift(seed: int) -> Any:
    """Queries of rows that stay alike and are revised: ``at(position, step)``."""
    base = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(seed))

    def at(position: int, step: int) -> Tensor:
        some = torch.Generator().manual_seed(1000 * position + step + seed)
        one = torch.Generator().manual_seed(position + seed)
        return (
            2 * base
            + torch.randn(HEADS, DIM, generator=one)
            + 0.1 * torch.randn(HEADS, DIM, generator=some)
        )

    return at


def run_steps(
    work: HostedWork,
    reads: tuple[HostedRead, ...],
    window: HostedWindow,
    layer: int,
    at: Any,
    counters: HostedCounters | None = None,
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Queries, outputs, lse and the newest position of some steps of one output."""
    made = []
    for step in range(STEPS):
        newest, rows = FIRST + step, min(step + 1, window.size)
        positions = [newest - age for age in range(rows)]
        q = torch.stack([at(position, step) for position in positions])
        members = [WindowRow(window, age) for age in range(rows)]
        work.load(positions, [reads] * rows, None, members)
        work.q[:rows] = q
        work.run(layer)
        out, lse = work.parts()
        made.append((q, out[:rows].clone(), lse[:rows].clone(), newest))
        work.collect(counters or HostedCounters())
    return made


@pytest.mark.parametrize(("kind", "size"), [("flat", 2), ("ivf", 4), ("graph", 9)])
def test_rows_read_what_they_have_not_read(kind: str, size: int) -> None:
    one, two = segment_of(300, kind), segment_of(200, kind, 3, keys="int8")
    dense = frozenset({1})
    reads = (HostedRead(one, 7, 20), HostedRead(two, 350, 15), HostedRead(one, 60, 20, dense))
    for layer in range(LAYERS):
        plain = Plain(reads, size, layer)
        made = run_steps(work_of(9), reads, HostedWindow(SHAPE, size), layer, drift(size))
        for q, out, lse, newest in made:
            expected = plain.step(q, newest)
            torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-4)
            torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-4)


def test_rows_of_a_window_do_read_on() -> None:
    """Else the law above would say little."""
    segment = segment_of(300, "flat")
    window = HostedWindow(SHAPE, 4)
    run_steps(work_of(9), (HostedRead(segment, 7, 20),), window, 0, drift(0))
    first, *later = window.tallies.tolist()
    assert first == STEPS * HEADS * 36
    assert all(100 < more < STEPS * HEADS * 20 for more in later)


def test_seen_sets_only_grow_and_are_as_long_as_some_searches() -> None:
    """What a row has been booked to have read stays so as long as it is in the window."""
    segment, size, count = segment_of(300, "graph"), 4, 20
    window, work = HostedWindow(SHAPE, size), work_of(9)
    at, before = drift(1), dict[int, list[set[int]]]()
    for step in range(STEPS):
        rows, newest = min(step + 1, size), FIRST + step
        positions = [newest - age for age in range(rows)]
        members = [WindowRow(window, age) for age in range(rows)]
        work.load(positions, [(HostedRead(segment, 7, count),)] * rows, None, members)
        work.q[:rows] = torch.stack([at(position, step) for position in positions])
        work.run(0)
        ids, steps, counts, _ = window._found[0]
        assert int(counts.max()) <= (size - 1) * count == ids.shape[2]
        now = {}
        # rows that are in the next step's window
        for position in positions[: size - 1]:
            now[position] = []
            for head in range(HEADS):
                booked = slice(counts[0, head])
                since = steps[0, head, booked] >= position
                now[position].append(set(ids[0, head, booked][since].tolist()))
            known = before.get(position, [set()] * HEADS)
            assert all(old <= new for old, new in zip(known, now[position], strict=True))
        for head, oldest in enumerate(now[min(now)]):
            assert ids[0, head, : counts[0, head]].tolist() == sorted(oldest)
        before = now


def test_a_step_that_is_made_again_reads_nothing_anew() -> None:
    segment = segment_of(300, "graph")
    reads, at = (HostedRead(segment, 7, 20),), drift(2)
    once, window, work = HostedWindow(SHAPE, 4), HostedWindow(SHAPE, 4), work_of(4)
    calm = run_steps(work_of(4), reads, once, 0, at)
    for q, out, lse, newest in calm:
        rows = len(q)
        positions = [newest - age for age in range(rows)]
        members = [WindowRow(window, age) for age in range(rows)]
        for _ in range(2):
            work.load(positions, [reads] * rows, None, members)
            work.q[:rows] = q
            work.run(0)
            mine = work.parts()
            torch.testing.assert_close(mine[0][:rows], out, rtol=0, atol=1e-6)
            torch.testing.assert_close(mine[1][:rows], lse, rtol=0, atol=1e-6)
    assert window.tallies.tolist() == once.tallies.tolist()


def test_windows_and_rows_on_their_own_share_a_step() -> None:
    """Two outputs at two places, of which one joins later, beside a row without a window."""
    segment = segment_of(300, "graph")
    at = [drift(3), drift(4), drift(5)]
    mine = (HostedRead(segment, 7, 20),), (HostedRead(segment, 90, 11),)
    alone = [
        run_steps(work_of(4), reads, HostedWindow(SHAPE, size), 1, asked)
        for reads, size, asked in zip(mine, (4, 2), at, strict=False)
    ]
    windows, work = (HostedWindow(SHAPE, 4), HostedWindow(SHAPE, 2)), work_of(16)
    oracle = HostedAttention(rotations(), sample=0.0)
    for step in range(STEPS + 2):
        inside = [n for n in range(2) if 0 <= step - 2 * n < STEPS]
        newest = [FIRST + step - 2 * n for n in inside]
        counts = [len(alone[n][step - 2 * n][0]) for n in inside]
        positions, reads = [*newest, 900 + step], [*(mine[n] for n in inside), mine[0]]
        members: list[WindowRow | None] = [*(WindowRow(windows[n], 0) for n in inside), None]
        q = [alone[n][step - 2 * n][0][:1] for n in inside] + [at[2](900, step)[None]]
        for n, top, count in zip(inside, newest, counts, strict=True):
            positions += [top - age for age in range(1, count)]
            reads += [mine[n]] * (count - 1)
            members += [WindowRow(windows[n], age) for age in range(1, count)]
            q.append(alone[n][step - 2 * n][0][1:])
        work.load(positions, reads, None, members)
        together = torch.cat(q)
        work.q[: len(together)] = together
        work.run(1)
        out, _ = work.parts()
        row = len(inside) + 1
        expected = oracle.decode(1, q[len(inside)], [900 + step], [mine[0]], RULES[1])
        torch.testing.assert_close(out[row - 1], expected.out[0], rtol=0, atol=2e-5)
        for place, (n, count) in enumerate(zip(inside, counts, strict=True)):
            rows = [place, *range(row, row + count - 1)]
            assert torch.equal(out[rows], alone[n][step - 2 * n][1])
            row += count - 1


def test_who_reads_all_keys_leaves_nothing_to_read() -> None:
    segment = segment_of(300, "graph")
    window, plain = HostedWindow(SHAPE, 3), Plain((HostedRead(segment, 7, 300),), 3, 0)
    for q, out, _, newest in run_steps(work_of(4), plain.reads, window, 0, drift(6)):
        torch.testing.assert_close(out, plain.step(q, newest)[0], rtol=0, atol=1e-4)
    assert window.tallies.tolist() == [STEPS * HEADS * 300, 0, 0]


def test_no_key_is_fetched_for_past_rows() -> None:
    """Counters have what the newest rows read, whatever the window."""
    segment, counted = segment_of(300, "graph"), []
    for size in (2, 9):
        work, counters = work_of(9), HostedCounters()
        window, reads = HostedWindow(SHAPE, size), (HostedRead(segment, 7, 20),)
        run_steps(work, reads, window, 0, drift(7), counters)
        counted.append((counters.keys, counters.keys_read, counters.keys_scanned))
    assert counted[0] == counted[1]
