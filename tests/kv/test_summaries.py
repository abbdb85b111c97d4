"""A page's summary belongs to its present generation."""

import torch

from looseleaf.kv.pool import PagePool
from looseleaf.kv.summaries import PageSummaries
from looseleaf.sparse.infllm import REPRESENTATIVES
from looseleaf.sparse.quest import BOUNDS

LAYERS, HEADS, SIZE, DIM = 2, 2, 16, 8


def make_pool(dtype: torch.dtype = torch.float32) -> PagePool:
    pool = PagePool(
        num_pages=12, page_size=SIZE, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=generator))
    return pool


def full(count: int) -> torch.Tensor:
    return torch.full((count,), SIZE, dtype=torch.int64)


def test_no_key_scores_above_the_bound_of_its_page() -> None:
    pool = make_pool()
    pages = pool.allocate(5) or []
    counts = torch.tensor([16, 16, 3, 1, 16])
    bounds = PageSummaries(pool, BOUNDS)
    bounds.write(pages, counts.numpy())
    q = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(1))
    extended = torch.cat([q.clamp_min(0), q.clamp_max(0)], -1)
    for layer in range(LAYERS):
        k = pool.layer(layer)[0]
        for page, count in zip(pages, counts.tolist(), strict=True):
            bound = (extended * bounds.layer(layer)[page]).sum(-1)
            best = (q[:, None] * k[page, :, :count]).sum(-1).amax(-1)
            assert (best <= bound + 1e-5).all()


def test_a_page_that_is_used_again_never_shows_what_it_held_before() -> None:
    pool = make_pool()
    bounds = PageSummaries(pool, BOUNDS)
    pages = pool.allocate(3) or []
    assert bounds.write(pages, full(3).numpy()) == 3
    assert bounds.write(pages, full(3).numpy()) == 0
    pool.free(pages)
    again = pool.allocate(3) or []
    assert again == pages
    pool.kv[:, 0, again] += 100.0
    assert bounds.write(again, full(3).numpy()) == 3
    assert (bounds.layer(0)[again] > 50).all()


def test_eight_bit_keys_have_their_bounds_in_sixteen() -> None:
    pool = make_pool(torch.float8_e4m3fn)
    bounds = PageSummaries(pool, BOUNDS)
    pages = pool.allocate(2) or []
    bounds.write(pages, full(2).numpy())
    keys = pool.kv[1, 0, pages].float()
    assert torch.equal(bounds.layer(1)[pages][..., :DIM].float(), keys.amax(2))


def test_the_score_of_representatives_is_the_mean_of_the_four_farthest_keys() -> None:
    pool = make_pool()
    pages = pool.allocate(2) or []
    kept = PageSummaries(pool, REPRESENTATIVES)
    kept.write(pages, torch.tensor([16, 2]).numpy())
    keys = pool.kv[0, 0, pages[0], 1]
    far = (keys - keys.mean(0)).norm(dim=-1).argsort(descending=True)[:4]
    assert torch.allclose(kept.layer(0)[pages[0], 1], keys[far].mean(0), atol=1e-6)
    two = pool.kv[0, 0, pages[1], 1, :2]
    assert torch.allclose(kept.layer(0)[pages[1], 1], two.mean(0), atol=1e-6)
