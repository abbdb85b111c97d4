"""Peers of the attention benchmark read the pages that ours reads, or are skipped with a reason."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf_lab.bench import attention_peers
from looseleaf_lab.bench.attention import AttentionConfig, Bench, measure
from looseleaf_lab.bench.attention_cases import (
    AttentionShape,
    Case,
    after_documents,
    causal,
    private,
    ragged,
    shared,
)
from looseleaf_lab.bench.attention_peers import peers_of

SHAPE = AttentionShape(4, 2, 32, layers=2, dtype=torch.float32)
SMALL = AttentionConfig(SHAPE, longest=128, rows=4, repetitions=1, device="cpu")


def keys_of(pages: Tensor, table: tuple[Tensor, Tensor, Tensor], row: int) -> Tensor:
    """What a page table says that a row reads: ``[keys, kv_heads, head_dim]``."""
    indptr, indices, last = table
    mine = indices[indptr[row] : indptr[row + 1]].long()
    flat = pages[mine].transpose(1, 2).flatten(0, 1)
    return flat[: (len(mine) - 1) * pages.shape[2] + int(last[row])]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and lse of queries at the end of the keys."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q))
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


class Decode:
    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "HND"

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *heads: int, **d: Any) -> None:
        assert heads == (4, 2, 32, 16)
        self.table = indptr, indices, last

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        rows = [
            attend(q[n : n + 1], *(keys_of(side, self.table, n) for side in pages))[0]
            for n in range(len(q))
        ]
        return torch.cat(rows)


class Prefill(Decode):
    def plan(self, rows: Tensor, *rest: Any, causal: bool, **options: Any) -> None:  # type: ignore[override]
        self.rows, self.causal = rows.tolist(), causal
        super().plan(*rest, **options)

    def states(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for n in range(len(self.rows) - 1):
            mine = q[self.rows[n] : self.rows[n + 1]]
            keys = (keys_of(side, self.table, n) for side in pages)
            out, lse = attend(mine, *keys, causal=self.causal)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        return self.states(q, pages)[0]


class Cascade:
    def __init__(self, levels: int, workspace: Tensor, layout: str) -> None:
        self.levels = [Prefill(workspace, layout) for _ in range(levels)]

    def plan(self, *lists: Any, q_data_type: torch.dtype) -> None:
        *tables, a, b, c, d = lists
        for level, *table in zip(self.levels, *tables, strict=True):
            level.plan(*table, a, b, c, d, causal=False)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        states = [level.states(q, pages) for level in self.levels]
        weight = torch.stack([lse for _, lse in states]).softmax(0)[..., None]
        return (weight * torch.stack([out for out, _ in states])).sum(0)


class Ragged:
    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"

    def plan(self, rows: Tensor, keys: Tensor, *heads: int, causal: bool, **dtype: Any) -> None:
        assert heads == (4, 2, 32) and causal and torch.equal(rows, keys)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True)[0]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A package with FlashInfer's interface that computes as its documentation says."""
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        MultiLevelCascadeAttentionWrapper=Cascade,
    )
    monkeypatch.setattr(attention_peers, "_flashinfer", lambda q: package)
    monkeypatch.setattr(attention_peers, "_WORKSPACE_BYTES", 16)
    return package


CASES = {
    "decode": private(SHAPE, 3, 70),
    "decode, tensor cores": private(SHAPE, 2, 33),
    "cascade": shared(SHAPE, 4, 64, tail=5, spread=3),
    "paged prefill, fa2": after_documents(SHAPE, 9, 2, 48),
    "paged prefill, fa3": causal(SHAPE, 50),
    "ragged prefill, fa2": causal(SHAPE, 33),
    "ragged prefill, fa3": causal(SHAPE, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_a_peer_that_reads_our_pages_gives_our_answer(
    flashinfer: SimpleNamespace, name: str
) -> None:
    case = CASES[name]
    bench = Bench(SMALL, case.num_pages, case.longest)
    q = bench.query(case)
    ours = [bench.layer(q, bench.plan(case), n, bench.flat) for n in range(2)]
    missing: list[str] = []
    peers = {peer.name: peer for peer in peers_of(case, SHAPE, q, missing.append)}
    peer = peers[f"flashinfer {name}"]
    for answer, pool in zip(ours, bench.pools, strict=True):
        torch.testing.assert_close(peer.attend((pool[0], pool[1])), answer)
    assert not any("flashinfer" in reason for reason in missing)


def rows_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], list[str]]:
    monkeypatch.setattr("looseleaf_lab.bench.attention.cases", lambda config: [case])
    missing: list[str] = []
    rows = list(measure(SMALL, missing.append))
    return {str(row["arm"]) for row in rows}, missing


def test_peers_stand_in_the_table_and_missing_ones_are_named(
    flashinfer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, missing = rows_of(CASES["cascade"], monkeypatch)
    assert {"flashinfer cascade", "flashinfer decode", "looseleaf", "ungrouped"} <= arms
    arms, missing = rows_of(causal(SHAPE, 40), monkeypatch)
    assert {"torch sdpa, flash", "flashinfer paged prefill, fa3"} <= arms
    assert any("cuDNN needs a GPU" in reason for reason in missing)
    _, missing = rows_of(ragged(SHAPE, 4, 40), monkeypatch)
    assert any("no partly filled page" in reason for reason in missing)


def test_a_peer_with_another_answer_is_not_timed(
    flashinfer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decode, "run", lambda self, q, pages: q)
    arms, missing = rows_of(CASES["decode"], monkeypatch)
    assert not any(arm.startswith("flashinfer") for arm in arms)
    assert any("its answer differs" in reason for reason in missing)


def test_without_the_package_the_reason_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_peers, "find_spec", lambda name: None)
    arms, missing = rows_of(CASES["decode"], monkeypatch)
    assert not any(arm.startswith("flashinfer") for arm in arms)
    assert any("pip install flashinfer-python" in reason for reason in missing)
    no_peers = list(measure(replace(SMALL, peers=False), missing.append))
    assert not any(str(row["arm"]).startswith("torch") for row in no_peers)
