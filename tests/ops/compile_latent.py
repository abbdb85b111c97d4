"""Compiles kernels over latent keys and over keys expanded from them; prints a line of JSON each.

A script, as `compile_variants` is."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from looseleaf.attention.plan.cost_model import default_cost_model
from looseleaf.ops.page_scores import LayerRules
from looseleaf.ops.page_scores.kernel import _page_scores_kernel, page_scores_triton
from looseleaf.ops.partial_attention.kernel import (
    _partial_attention_kernel,
    partial_attention_triton,
)
from looseleaf.ops.prefill_attention.kernel import (
    _prefill_attention_kernel,
    prefill_attention_triton,
)
from looseleaf.ops.store_kv.kernel import _store_kv_kernel, store_kv_triton
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.candidates import candidate_list
from looseleaf_lab.testing.compile import Compiled, compiling
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.scene import Shape

LATENT = Shape(
    dtype=torch.bfloat16, num_qo_heads=16, num_kv_heads=1, head_dim=576, rotary_dim=64,
    interleaved=True, latent=True,
)  # fmt: skip


def compiled_latent() -> Iterator[Compiled]:
    """Both tiles of decode over latent keys, prefill with patches and over expanded keys, a store,
    and scores of pages."""
    costs = default_cost_model(LATENT.head_dim, 2, 132, latent=True)
    kernels_of = _partial_attention_kernel, _prefill_attention_kernel, _store_kv_kernel
    with compiling(*kernels_of, _page_scores_kernel) as kernels:
        scene = SceneBuilder(0, LATENT).decode()
        pages, rest = (scene.k_pages, scene.v_pages), (scene.rotation, scene.rule)
        bounds = torch.tensor([0, 1], dtype=torch.int32)
        for cost in (costs.narrow, costs.wide):
            work = replace(work_list(scene), tiles=(cost.tile,), tile_indptr=bounds)
            partial_attention_triton(scene.q, *pages, work, *rest)
        positions, k = torch.arange(len(scene.q)), scene.q[:, :1]
        store_kv_triton(k, k, positions, positions, scene.rotation, *pages)
        shape = replace(LATENT, masks=True, patches=True)
        scene, rows_of, spans_of = SceneBuilder(0, shape).prefill()
        spans = span_list(scene, rows_of, spans_of, tile_rows=8)
        rest = scene.rotation, scene.rule, scene.slot_positions
        prefill_attention_triton(scene.q, scene.k_pages, scene.v_pages, spans, *rest)
        _compile_expanded()
        for dtype in (torch.bfloat16, torch.float32):
            _compile_latent_scores(dtype)
    yield from kernels


def _compile_latent_scores(dtype: torch.dtype) -> None:
    """Scores of pages by two vectors of latents, in the longest runs."""
    scene, candidates = (
        SceneBuilder(0, replace(LATENT, dtype=dtype)).decode(),
        candidate_list(0, 2, 300),
    )
    vectors = torch.zeros(64, 1, 2 * LATENT.head_dim, dtype=dtype)
    rules = LayerRules(scene.rotation, scene.rule, LATENT.page_size)
    page_scores_triton(scene.q, vectors, candidates, candidates.num_pages, rules, 32)


def _compile_expanded() -> None:
    """Prefill over keys expanded from latents: dims of DeepSeek's and of GLM-4.7-Flash's heads."""
    for dtype, head_dim in ((torch.bfloat16, 192), (torch.float32, 192), (torch.float16, 320)):
        shape = Shape(
            dtype=dtype, head_dim=head_dim, rotary_dim=64, num_kv_heads=4, interleaved=True
        )
        scene, rows_of, spans_of = SceneBuilder(0, replace(shape, most_rows=200)).prefill()
        spans = span_list(scene, rows_of, spans_of, tile_rows=128)
        pages, rest = (scene.k_pages, scene.v_pages), (scene.rotation, scene.rule, None)
        prefill_attention_triton(scene.q, *pages, replace(spans, value_start=64), *rest)


if __name__ == "__main__":
    for kernel in compiled_latent():
        print(json.dumps({"shape": "latent"} | asdict(kernel)), flush=True)
