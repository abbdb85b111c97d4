"""Latent attention on a CUDA device, at the sizes of DeepSeek's models."""

from dataclasses import replace

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams
from looseleaf.config import Fuse, Select
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.partial_attention import partial_attention
from looseleaf.ops.prefill_attention import prefill_attention
from looseleaf_lab.bench.attention import AttentionConfig, Bench
from looseleaf_lab.bench.attention_cases import (
    AttentionShape,
    after_documents,
    causal,
    private,
    ragged,
    shared,
)
from looseleaf_lab.bench.attention_check import check
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Shape, with_values
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

LARGE = Shape(
    device="cuda",
    dtype=torch.bfloat16,
    num_qo_heads=16,
    num_kv_heads=1,
    head_dim=576,
    rotary_dim=64,
    interleaved=True,
    latent=True,
    softmax_scale=0.05,
    longest_document=700,
    longest_tail=100,
    num_requests=6,
    most_rows=80,
)
VARIANTS = {
    "bf16": LARGE,
    "bf16-128-heads": replace(LARGE, num_qo_heads=128, num_requests=3, most_rows=20),
    "bf16-20-heads-halves": replace(LARGE, num_qo_heads=20, interleaved=False),
    "bf16-masks-patches": replace(LARGE, masks=True, patches=True, page_size=32),
    "fp16-window": replace(LARGE, dtype=torch.float16, window=150),
    "fp32": replace(LARGE, dtype=torch.float32),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}
PROMPT = [
    "Notes on a house. ",
    Document("Mira Tolland keeps the keys of the archive. " * 4, name="keys"),
    Document("The archive stands in Quorin, behind the old mill. " * 3, name="place"),
    "Who keeps the keys?",
]


@EVERY_VARIANT
def test_decode_attends_within_the_budget_grouped_or_not(variant):
    scene = SceneBuilder(1, VARIANTS[variant]).decode()
    truth, plain = dense_attention(scene), plain_attention(scene)
    for grouped, pages in [(True, None), (False, 7)]:
        work = work_list(scene, grouped=grouped, pages_per_item=pages)
        with poisoned():
            states = partial_attention(
                scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
                scene.slot_positions, "triton",
            )  # fmt: skip
            out = torch.empty_like(scene.q)
            merged = merge_states(states, work.row_state_indptr, out=out, implementation="triton")
        assert_state_within_budget(with_values(scene, merged), truth, plain, scene.shape.dtype)


@EVERY_VARIANT
def test_prefill_attends_within_the_budget(variant):
    scene, rows_of, spans_of = SceneBuilder(2, VARIANTS[variant]).prefill()
    spans = span_list(scene, rows_of, spans_of, tile_rows=8)
    with poisoned():
        actual = prefill_attention(
            scene.q, scene.k_pages, scene.v_pages, spans, scene.rotation, scene.rule,
            scene.slot_positions, "triton",
        )  # fmt: skip
    truth, plain = dense_attention(scene), plain_attention(scene)
    # fp32 products are added one after another: an error grows as the root of their number, 576
    dtype = scene.shape.dtype
    steps = 24 // 2 if dtype == torch.float32 else 1
    assert_state_within_budget(with_values(scene, actual), truth, plain, dtype, steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [192, 320])
def test_prefill_over_expanded_keys_is_within_the_budget(dtype, head_dim):
    """Values have no rotated dims; 320 dims are those of GLM-4.7-Flash."""
    shape = replace(LARGE, dtype=dtype, num_kv_heads=16, head_dim=head_dim, latent=False)
    scene, rows_of, spans_of = SceneBuilder(4, shape).prefill()
    truth, plain = dense_attention(scene), plain_attention(scene)
    # in the rotated dims all outputs are compared as zeros
    scene = replace(scene, shape=replace(shape, latent=True))
    spans = replace(span_list(scene, rows_of, spans_of, tile_rows=128), value_start=64)
    with poisoned():
        actual = prefill_attention(
            scene.q, scene.k_pages, scene.v_pages, spans, scene.rotation, scene.rule, None,
            "triton",
        )  # fmt: skip
    assert not actual.out[..., :64].any()
    states = (with_values(scene, state) for state in (actual, truth, plain))
    assert_state_within_budget(*states, dtype)


def test_e4m3_pages_are_read_as_their_numbers():
    scene = SceneBuilder(3, replace(LARGE, num_requests=3)).decode()
    narrow = to_pages(scene.k_pages.nan_to_num(0.0), FP8)
    wide = narrow.to(torch.bfloat16)
    outs = []
    for pages in (narrow, wide):
        work = work_list(scene)
        states = partial_attention(
            scene.q, pages, pages, work, scene.rotation, scene.rule, None, "triton"
        )
        outs.append(merge_states(states, work.row_state_indptr, implementation="triton").out)
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads", [16, 128])
def test_steps_as_planned_are_within_the_budget(heads):
    shape = replace(AttentionShape.of(model_shape("deepseek-v2-lite"), 1), num_qo_heads=heads)
    for case in (
        private(shape, 7, 777),
        ragged(shape, 40, 300, seed=1),
        shared(shape, 64, 1000, tail=37, spread=5),
        causal(shape, 500),
        after_documents(shape, 70, 3, 333),
    ):
        bench = Bench(AttentionConfig(shape), case.num_pages, case.longest)
        q = bench.query(case)
        for options in ({}, {"grouping": False}, {"invariant": True}):
            with poisoned():
                out = bench.layer(q, bench.plan(case, **options), 0, bench.rotation)
            assert check(case, q, out, bench.truth) <= 1


def _logprobs(folder, policy, **options):
    llm = LLM(folder, num_pages=128, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    output = llm.generate([PROMPT], params, **policy)[0]
    llm.engine.check()
    return [entry[0] for entry in output.outputs[0].logprobs]


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"select": Select("quest", tokens=64, dense_below=0)},
        {"fuse": Fuse("deviation", ratio=0.3)},
        {"fuse": Fuse("question", ratio=0.3)},
    ],
    ids=["plain", "select", "deviation", "question"],
)
def test_answers_at_real_sizes_are_those_of_the_cpu(tmp_path, policy):
    folder = make_checkpoint(tmp_path, "deepseek_v3", **SIZES)
    gpu, cpu = (_logprobs(folder, policy, dtype="float32", device=d) for d in ("cuda", "cpu"))
    assert [entry.token_id for entry in gpu] == [entry.token_id for entry in cpu]
    for mine, other in zip(gpu, cpu, strict=True):
        assert abs(mine.logprob - other.logprob) < 1e-3


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
@pytest.mark.parametrize("policy", [{}, {"fuse": Fuse("first", ratio=0.5)}], ids=["plain", "first"])
def test_long_prompts_over_expanded_keys_answer_as_over_latents(tmp_path, family, policy):
    folder = make_checkpoint(tmp_path, family, **SIZES)
    documents = [Document("The archive stands in Quorin. " * n, name=f"d{n}") for n in (20, 30)]
    prompt = ["Notes. ", *documents, "Mira Tolland keeps the keys of the archive. " * 45]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    logprobs = []
    for expands in (True, False):
        options = {"max_num_batched_tokens": 4096, "step_ms": 0.0}
        with LLM(folder, dtype="float32", device="cuda", num_pages=512, **options) as llm:
            attention = llm.engine.runner.attention
            if not expands:
                attention.latent = None
            output = llm.generate([prompt], params, **policy)[0]
            assert bool(attention.counters.gathered_keys) is expands
        logprobs.append([entry[0].logprob for entry in output.outputs[0].logprobs])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def test_documents_in_e4m3_pages_of_the_host_tier_answer_as_from_the_pool(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3", **SIZES)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = LLM(folder, dtype="bfloat16", device="cuda", num_pages=64, kv_dtype="fp8", host_gib=0.1)
    first = llm.generate([PROMPT], params)[0].outputs[0].token_ids
    llm.engine.store.evict_idle()
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == first
    llm.close()
