"""In batch-invariant mode an answer does not depend on who is in the batch or on grouping.

Attention has the same bits, interpreted kernels included; so have the logits of the same batch,
grouped or not. With other mates a product of matrices has other numbers of rows, and its bits may
differ: there it is the tokens that are the same.
"""

import random
from dataclasses import replace

import pytest
import torch

from looseleaf.attention.paged import PagedAttention, StepRows
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.config import RopeConfig
from looseleaf.kv.pool import PagePool
from looseleaf.ops.dispatch import Implementation
from looseleaf.rope import build_rotation
from looseleaf.types import ScoreRule
from tests.engine.harness import Folder, ask, document, drawn, make_llm, words

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 32
LEAD = words(1, 130)


def rows_of(seed: int, count: int) -> tuple[list[DecodeRow], int]:
    """Rows with some of four documents at any offset, half of them with tails that begin alike,
    and the pages of all."""
    rng, page = random.Random(seed), 1

    def pages(length: int) -> list[int]:
        nonlocal page
        taken = [*range(page, page + -(-length // PAGE_SIZE))]
        page += len(taken)
        return taken

    documents = [(length, pages(length)) for length in (1300, 70, 640, 20)]
    common, rows = pages(2560), []
    for n in range(count):
        settled, at = [], rng.randrange(30)
        for length, taken in rng.sample(documents, rng.randint(0, 3)):
            settled.append(ReadSpan(taken, at, length, len(taken)))
            at += length
        shared = common[: rng.choice([20, 33, 40])] if n % 2 else []
        own = rng.randint(1, 400)
        length = len(shared) * PAGE_SIZE + own
        tail = ReadSpan([*shared, *pages(own)], at, length, len(shared))
        rows.append(DecodeRow(at + length - 1, tuple(settled), tail))
    return rows, page


def attended(
    rows: list[DecodeRow], chosen: list[int], num_pages: int, grouping: bool, how: Implementation
) -> torch.Tensor:
    """The outputs of some of the rows, as a batch of their own."""
    generator = torch.Generator().manual_seed(0)
    pool = PagePool(
        num_pages=num_pages, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator))
    attention = PagedAttention(
        pool, (build_rotation(RopeConfig(HEAD_DIM, HEAD_DIM), 6000),), (ScoreRule(HEAD_DIM**-0.5),),
        HEADS, grouping=grouping, batch_invariant=True, implementation=how,
    )  # fmt: skip
    q = torch.randn(len(rows), HEADS, HEAD_DIM, generator=generator)[chosen]
    k = torch.randn(len(rows), KV_HEADS, HEAD_DIM, generator=generator)[chosen]
    some = [rows[n] for n in chosen]
    last = [(row.tail.pages[-1], row.tail.length - 1) for row in some]
    slots = torch.tensor([page * PAGE_SIZE + at % PAGE_SIZE for page, at in last])
    places = torch.tensor([at for _, at in last])
    return attention.step(StepRows(some, [], slots, places))(0, q, k, k)


@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_attention_has_the_same_bits_grouped_or_not_and_alone(
    implementation: Implementation,
) -> None:
    rows, num_pages = rows_of(1, 5)
    every = [*range(len(rows))]
    together = attended(rows, every, num_pages, True, implementation)
    assert torch.equal(together, attended(rows, every, num_pages, False, implementation))
    for chosen in ([3], [1, 3, 4]):
        some = attended(rows, chosen, num_pages, True, implementation)
        assert torch.equal(some, together[chosen])


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_the_same_seeds_give_the_same_tokens_grouped_or_not_whoever_is_with_them(
    checkpoint: Folder, cpu_kernels: str
) -> None:
    folder = checkpoint("llama", "default")
    prompts = [
        [LEAD, document(1, 41), document(2, 17), words(2, 9)],
        [LEAD, document(2, 17), document(1, 41), words(3, 5)],
        [LEAD + words(5, 30)],
        [LEAD + words(5, 30) + words(6, 3)],
    ]
    params = [drawn(seed, 8) for seed in range(4)]
    options = {"batch_invariant": True, "cpu_kernels": cpu_kernels}
    grouped = ask(make_llm(folder, **options), prompts, params)
    alone = ask(make_llm(folder, grouping=False, **options), prompts, params)
    for one, other in zip(grouped, alone, strict=True):
        assert one.token_ids == other.token_ids
        if cpu_kernels == "native":
            assert torch.equal(one.logits, other.logits)
    for n in (1, 3):
        (one,) = ask(make_llm(folder, **options), [prompts[n]], [replace(params[n])])
        assert one.token_ids == grouped[n].token_ids
