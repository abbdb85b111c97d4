"""Selection on a CUDA device: operators beside their references, and steps beside the CPU's."""

from dataclasses import replace

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.config import Revise
from looseleaf.ops.page_bounds import page_bounds
from looseleaf.ops.page_scores import LayerRules, page_scores
from looseleaf.ops.select_pages import PageScores, select_pages
from looseleaf.prompt.request import Request
from looseleaf.types import ScoreRule
from looseleaf_lab.testing.candidates import (
    NUM_KV_HEADS,
    UNWRITTEN,
    candidate_list,
    room_for,
    room_for_windows,
)
from looseleaf_lab.testing.scene import rotation_table
from tests.engine.harness import words

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
WRITTEN = (
    "item_page_indptr", "page_indices", "page_positions",
    "entry_offset", "entry_bound", "entry_mask",
)  # fmt: skip


def assert_written(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """The same wherever something must be written; what a place has room for besides is free."""
    assert torch.equal(mine[expected != UNWRITTEN], expected[expected != UNWRITTEN])


@pytest.mark.parametrize(
    ("rows", "most", "spans", "run"),
    [(3, 5, 1, 1), (4, 700, 3, 4), (2, 9000, 40, 8), (3, 9000, 1, 1), (2, 8192, 1, 16)],
)
def test_the_kernel_chooses_what_the_reference_does(
    rows: int, most: int, spans: int, run: int
) -> None:
    candidates = candidate_list(rows, rows, most, spans, "cuda", num_pages=4000)
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = torch.randn(rows, NUM_KV_HEADS, most, generator=generator, device="cuda")
    scores = torch.where(drawn.abs() < 0.8, (drawn * 4).round() / 4, drawn * 10)
    mine, other = (room_for(candidates, most, 16) for _ in range(2))
    for into, how in ((mine, "triton"), (other, "reference")):
        given = PageScores.of(scores, candidates, run)
        select_pages(given, candidates, into, implementation=how)  # type: ignore[arg-type]
    for name in WRITTEN:
        assert_written(getattr(mine.work, name), getattr(other.work, name))


@pytest.mark.parametrize(("rows", "most", "spans", "window"), [(3, 4000, 1, 9), (4, 700, 3, 4)])
def test_earlier_rows_read_what_is_new_to_them(
    rows: int, most: int, spans: int, window: int
) -> None:
    candidates = candidate_list(rows, rows, most, spans, "cuda", num_pages=4000)
    generator = torch.Generator("cuda").manual_seed(1)
    scores = torch.randn(rows, NUM_KV_HEADS, most, generator=generator, device="cuda")
    made = {}
    for how in ("triton", "reference"):
        into, seen = room_for_windows(candidates, most + 1, 16, window)
        given = PageScores.of(scores, candidates, 8)
        select_pages(given, candidates, into, seen, how)  # type: ignore[arg-type]
        made[how] = into, seen
    mine, other = (made[how] for how in ("triton", "reference"))
    for name in WRITTEN:
        assert_written(getattr(mine[0].work, name), getattr(other[0].work, name))
    for name in ("registers", "booked", "chosen"):
        assert torch.equal(getattr(mine[1], name), getattr(other[1], name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_are_those_of_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    keys = torch.randn(3, 50, 2, 16, 128, generator=generator, device="cuda").to(dtype)
    counts = torch.randint(1, 17, (50,), generator=generator, device="cuda")
    mine, other = (page_bounds(keys, counts, how) for how in ("triton", "reference"))
    assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("two", "spans"), [(False, 3), (True, 3), (True, 1)])
def test_the_kernel_scores_as_the_reference_does(dtype: torch.dtype, two: bool, spans: int) -> None:
    candidates = candidate_list(4, 3, 500, spans, "cuda")
    generator = torch.Generator("cuda").manual_seed(4)
    dim = 128
    shape = 64, NUM_KV_HEADS, dim * (1 + two)
    vectors = torch.randn(*shape, generator=generator, device="cuda").to(dtype)
    q = torch.randn(3, 4 * NUM_KV_HEADS, dim, generator=generator, device="cuda").to(dtype)
    frequencies = 1.0 / 100 ** (torch.arange(0, dim, 2, device="cuda") / dim)
    rotation = rotation_table(frequencies.double(), 12000, False)
    positions = torch.tensor([9000, 11000, 8100], dtype=torch.int32, device="cuda")
    rules = LayerRules(rotation, ScoreRule(dim**-0.5), 16)
    exact = page_scores(
        q.double(), vectors.double(), candidates, positions, rules, implementation="reference"
    ).each
    mine = page_scores(q, vectors, candidates, positions, rules, 8, implementation="triton").each
    # the turned query is rounded to the dtype of the vectors, once a dim
    error = torch.finfo(dtype).eps * 4 * dim**0.5 + 1e-3
    for row in range(int(candidates.num_rows)):
        count = int(candidates.num_pages[row])
        finite = exact[row, :, :count].isfinite()
        difference = (mine[row, :, :count].double() - exact[row, :, :count])[finite]
        assert difference.abs().max() < error
        assert (mine[row, :, :count].isfinite() == finite).all()


# no page is like another, so that no score is nearly that of another page
PROMPTS = [
    [Document(words(1, 300)), words(2, 60)],
    words(3, 350),
    [words(4, 30), Document(words(5, 200)), Document(words(6, 200)), words(7, 40)],
]
QUEST = Select("quest", tokens=128, dense_below=0)


SOME = Select("representatives", tokens=96, dense_below=0)


def answers(graphs: bool, policies: list[dict[str, object]], alone: bool = False, **options):
    """Tokens and log probabilities of the prompts, each under its policies."""
    llm = LLM(dtype="float32", device="cuda", num_pages=512, cuda_graphs=graphs, **options)
    found, params = {}, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
    for group in [[n] for n in range(len(policies))] if alone else [range(len(policies))]:
        added = {}
        for n in group:
            parts = llm.engine.prompts.from_parts(PROMPTS[n % len(PROMPTS)])
            added[n] = llm.engine.add(Request(f"{n}", parts, params, **policies[n]))  # type: ignore[arg-type]
        while llm.engine.has_work:
            llm.engine.step()
        for n, progress in added.items():
            [output] = progress.output().outputs
            found[n] = output.token_ids, [entry[0].logprob for entry in output.logprobs or ()]
    llm.engine.check()
    return [found[n] for n in range(len(policies))], llm.engine


def assert_alike(mine, other, tolerance: float = 1e-3) -> None:
    for (tokens, logprobs), (wanted, expected) in zip(mine, other, strict=True):
        assert tokens == wanted
        assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) <= tolerance


@pytest.mark.parametrize("policy", ["quest", "representatives", "window", "partial"])
def test_a_policy_on_the_gpu_chooses_what_it_does_on_the_cpu(policy: str) -> None:
    select = Select(policy, tokens=128, dense_below=0)  # type: ignore[arg-type]
    mine, _ = answers(True, [{"select": select}] * 3)
    llm = LLM(dtype="float32", device="cpu", num_pages=512)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, select=select)
    assert [tokens for tokens, _ in mine] == [o.token_ids for o in outputs]
    assert all(o.select is not None and o.select.chosen_steps for o in outputs)


BY_TENSORS = [
    Select("window", tokens=128, dense_below=0), Select("partial", tokens=128, dense_below=0),
    Select("quest", tokens=128, group="sum", dense_below=0),
    Select("representatives", mass=0.6, dense_below=0),
    Select("quest", mass=0.9, tokens=160, dense_layers=(), dense_below=0),
]  # fmt: skip


SHARED = [
    Select("quest", tokens=128, dense_below=0, dense_layers=(), anchors=(0, 3)),
    Select("quest", tokens=128, dense_below=0, anchors=(2,)),
    Select("representatives", mass=0.6, dense_below=0, anchors=(2, 5)),
]


@pytest.mark.parametrize("select", SHARED, ids=str)
def test_layers_that_share_a_choice_replay_with_the_answers_of_the_cpu(select: Select) -> None:
    mine, engine = answers(True, [{"select": select}] * 3)
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.replays >= engine.counters.steps - 1
    assert_alike(mine, answers(False, [{"select": select}] * 3)[0])
    llm = LLM(dtype="float32", device="cpu", num_pages=512)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, select=select)
    assert [tokens for tokens, _ in mine] == [o.token_ids for o in outputs]
    # anchors at every layer have the answers of a choice in each
    own, every = (replace(select, anchors=anchors) for anchors in (None, tuple(range(8))))
    assert answers(True, [{"select": every}] * 3)[0] == answers(True, [{"select": own}] * 3)[0]


# what chooses by places alone can't be revised
@pytest.mark.parametrize(
    ("select", "window"),
    [(s, window) for s in BY_TENSORS for window in (1, 4) if window == 1 or s.policy != "window"],
    ids=str,
)
def test_what_is_chosen_by_tensors_replays_with_the_answers_of_the_cpu(
    select: Select, window: int
) -> None:
    how = {"select": select, "revise": Revise(window)}
    mine, engine = answers(True, [how] * 3)
    graphs = engine.runner.graphs
    # all but perhaps the first, which computes the prompts
    assert graphs is not None and graphs.replays >= engine.counters.steps - 1
    assert_alike(mine, answers(False, [how] * 3)[0])
    llm = LLM(dtype="float32", device="cpu", num_pages=512)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    others = llm.generate(PROMPTS, params, **how)  # type: ignore[arg-type]
    assert [tokens for tokens, _ in mine] == [o.token_ids for o in others]
    if window == 1:
        # of a mass only the device knows how many pages it was; a step may have been run ahead
        reads = [(o.select.pages_read, o.select.pages_held) for o in others if o.select]
        shares = [read / held for read, held in reads]
        progress = engine.counters
        expected = sum(read for read, _ in reads) / sum(held for _, held in reads)
        assert progress.pages_read / progress.pages_held == pytest.approx(expected, rel=2e-2)
        assert all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_steps_that_choose_and_revise_replay_as_graphs_with_the_same_answers(window: int) -> None:
    policies = [{"select": QUEST, "revise": Revise(window)}] * 3
    mine, engine = answers(True, policies)
    other, _ = answers(False, policies)
    assert_alike(mine, other)
    graphs = engine.runner.graphs
    # all but perhaps the first, which computes the prompts
    assert graphs is not None and graphs.replays >= engine.counters.steps - 1


@pytest.mark.parametrize("window", [2, 9])
def test_revision_on_the_gpu_is_that_of_the_cpu(window: int) -> None:
    policies = [{"select": QUEST, "revise": Revise(window)}] * 3
    mine, _ = answers(True, policies)
    llm = LLM(dtype="float32", device="cpu", num_pages=512)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    others = llm.generate(PROMPTS, params, select=QUEST, revise=Revise(window))
    assert [tokens for tokens, _ in mine] == [o.token_ids for o in others]


def test_a_window_of_one_is_the_base_policy_to_the_bit() -> None:
    base, _ = answers(True, [{"select": QUEST}] * 3)
    revised, _ = answers(True, [{"select": QUEST, "revise": Revise(1)}] * 3)
    assert base == revised


def test_a_batch_of_mixed_policies_equals_one_at_a_time() -> None:
    policies = [
        {}, {"select": QUEST}, {"select": QUEST, "revise": Revise(4)},
        {"select": Select("window", tokens=128)}, {"select": SOME},
        {"select": QUEST, "revise": Revise(2)},
    ]  # fmt: skip
    together, _ = answers(True, policies)
    alone, _ = answers(True, policies, alone=True)
    assert_alike(together, alone)


def test_rows_of_several_policies_replay_in_turn_with_the_same_answers() -> None:
    policies = [
        {}, {"select": QUEST}, {"select": QUEST, "revise": Revise(4)}, {"select": SOME},
        {"select": Select("quest", tokens=96, dense_below=0)},
        {"select": QUEST, "revise": Revise(2)}, {"select": QUEST},
    ]  # fmt: skip
    together, engine = answers(True, policies)
    alone, _ = answers(True, policies, alone=True)
    assert_alike(together, alone)
    graphs = engine.runner.graphs
    # five policies, in all steps but the first ones
    assert graphs is not None and graphs.replays > 4 * engine.counters.steps


@pytest.mark.parametrize("below", [4000, None])
def test_below_its_threshold_a_policy_replays_the_graphs_of_dense_decode(
    below: int | None,
) -> None:
    """The same graphs take the same time; left out, the threshold is longer than these prompts."""
    llm = LLM(dtype="float32", device="cuda", num_pages=512, prefix_caching=False)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    # the first time the documents are computed
    dense = [llm.generate(PROMPTS, params) for _ in range(2)][1]
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    captured = graphs.num_captured
    policy = Select("quest", tokens=128, dense_below=below)
    outputs = llm.generate(PROMPTS, params, select=policy, revise=Revise(4))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in dense]
    assert graphs.num_captured == captured
