"""Selection on a CUDA device: operators beside their references, and steps beside the CPU's."""

import pytest
import torch

from looseleaf.ops.page_scores import page_scores
from looseleaf.ops.select_pages import select_pages
from looseleaf.testing.candidates import NUM_KV_HEADS, candidate_list, room_for
from looseleaf.testing.scene import rotation_table
from looseleaf.types import ScoreRule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
WRITTEN = (
    "item_page_indptr", "page_indices", "page_positions",
    "entry_offset", "entry_bound", "entry_mask",
)  # fmt: skip


@pytest.mark.parametrize(("rows", "most", "spans"), [(3, 5, 1), (4, 700, 3), (2, 9000, 40)])
def test_the_kernel_chooses_what_the_reference_does(rows: int, most: int, spans: int) -> None:
    candidates = candidate_list(rows, rows, most, spans, "cuda", num_pages=4000)
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = torch.randn(rows, NUM_KV_HEADS, most, generator=generator, device="cuda")
    scores = torch.where(drawn.abs() < 0.8, (drawn * 4).round() / 4, drawn * 10)
    mine, other = (room_for(candidates, most, 16) for _ in range(2))
    select_pages(scores, candidates, mine, implementation="triton")
    select_pages(scores, candidates, other, implementation="reference")
    for name in WRITTEN:
        assert torch.equal(getattr(mine.work, name), getattr(other.work, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("two", [False, True])
def test_the_kernel_scores_as_the_reference_does(dtype: torch.dtype, two: bool) -> None:
    candidates = candidate_list(4, 3, 500, 3, "cuda")
    generator = torch.Generator("cuda").manual_seed(4)
    dim = 128
    shape = 64, NUM_KV_HEADS, dim * (1 + two)
    vectors = torch.randn(*shape, generator=generator, device="cuda").to(dtype)
    q = torch.randn(3, 4 * NUM_KV_HEADS, dim, generator=generator, device="cuda").to(dtype)
    frequencies = 1.0 / 100 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    rotation = rotation_table(frequencies.double(), 12000, False)
    positions = torch.tensor([9000, 11000, 8100], dtype=torch.int32, device="cuda")
    how = rotation, ScoreRule(dim**-0.5), 16
    exact = page_scores(q.double(), vectors.double(), candidates, positions, how, "reference")
    mine = page_scores(q, vectors, candidates, positions, how, "triton")
    # the turned query is rounded to the dtype of the vectors, once a dim
    error = torch.finfo(dtype).eps * 4 * dim**0.5 + 1e-3
    for row in range(int(candidates.num_rows)):
        count = int(candidates.num_pages[row])
        finite = exact[row, :, :count].isfinite()
        difference = (mine[row, :, :count].double() - exact[row, :, :count])[finite]
        assert difference.abs().max() < error
        assert (mine[row, :, :count].isfinite() == finite).all()


@pytest.mark.parametrize("policy", ["quest", "representatives", "window", "partial"])
def test_a_full_budget_equals_dense_decode_in_the_engine(policy: str) -> None:
    from looseleaf import LLM, SamplingParams, Select

    llm = LLM(dtype="float32", device="cuda", num_pages=512)
    prompts = ["The seal of Orlen Gate is anchor. " * n + "What is the seal?" for n in (30, 50, 9)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    dense = llm.generate(prompts, params)
    # one page short of everything: the choice runs, and leaves out what matters least
    select = Select(policy, ratio=0.98, dense_layers=())  # type: ignore[arg-type]
    chosen = llm.generate(prompts, params, select=select)
    assert [o.token_ids for o in chosen] == [o.token_ids for o in dense]
    assert all(o.select is not None and o.select.chosen_steps for o in chosen[:2])
