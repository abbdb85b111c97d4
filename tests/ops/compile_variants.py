"""Compiles what the launchers launch for an H100 and prints one JSON line a kernel.

Run in a process of its own by `test_compile.py`: triton must not be interpreted here.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from looseleaf.config import ExpertConfig
from looseleaf.ops.add_sinks.kernel import _add_sinks_kernel, add_sinks_triton
from looseleaf.ops.attention_received import Readers
from looseleaf.ops.attention_received.kernel import (
    _attention_received_kernel,
    attention_received_triton,
)
from looseleaf.ops.dense.gated_linear.kernel import _gated_linear_kernel, gated_linear_gluon
from looseleaf.ops.dense.gated_many.kernel import _gated_many_kernel, gated_linear_many
from looseleaf.ops.dense.gated_several.kernel import _gated_several_kernel, gated_linear_several
from looseleaf.ops.dense.likeliest.kernel import _blocks_kernel, _row_kernel, likeliest_triton
from looseleaf.ops.dense.plane_linear import split_planes
from looseleaf.ops.dense.plane_linear.kernel import (
    _dequantize_planes_kernel,
    _plane_linear_kernel,
    dequantize_planes_triton,
)
from looseleaf.ops.dense.plane_linear.kernel import launch as launch_planes
from looseleaf.ops.dense.plane_linear.vectors import TILE
from looseleaf.ops.dense.plane_linear.vectors.kernel import _plane_vectors_kernel
from looseleaf.ops.dense.plane_linear.vectors.kernel import launch_vectors as launch_plane_vectors
from looseleaf.ops.dense.rms_norm.kernel import _rms_norm_kernel, rms_norm_triton
from looseleaf.ops.dense.scaled_linear import quantize
from looseleaf.ops.dense.scaled_linear.kernel import (
    _add_parts_kernel,
    _quantize_rows_kernel,
    _scaled_linear_kernel,
    quantize_rows_triton,
    scaled_linear_triton,
)
from looseleaf.ops.dense.scaled_linear.kernel import launch as launch_scaled
from looseleaf.ops.dense.scaled_linear.vectors.kernel import (
    _one_vector_kernel,
    _scaled_vectors_kernel,
    launch_vectors,
)
from looseleaf.ops.dense.silu_mul.kernel import _silu_mul_kernel, silu_mul_triton
from looseleaf.ops.dense.split_linear import num_parts
from looseleaf.ops.dense.split_linear.kernel import (
    _split_linear_kernel,
    split_linear_triton,
    whole_linear_triton,
)
from looseleaf.ops.experts.group import RowGroups
from looseleaf.ops.experts.group.kernel import (
    _count_kernel,
    _group_few_kernel,
    _place_kernel,
    _sum_kernel,
)
from looseleaf.ops.experts.mlp import ClampedSwiglu
from looseleaf.ops.experts.mlp.kernel import _down_kernel, _gate_kernel, expert_mlp_triton
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.mlp.vectors import few_tile
from looseleaf.ops.experts.mlp.vectors.kernel import (
    _down_vectors_kernel,
    _gate_vectors_kernel,
    launch_down,
    launch_gate,
)
from looseleaf.ops.experts.route import Routes
from looseleaf.ops.experts.route.kernel import _route_kernel, route_triton
from looseleaf.ops.fetch_numbers import num_blocks
from looseleaf.ops.fetch_numbers.kernel import (
    _fetch_numbers_kernel,
    _fetch_turn_kernel,
    fetch_numbers_triton,
    fetch_turn_triton,
)
from looseleaf.ops.finish_rows.kernel import _finish_rows_kernel, finish_rows_triton
from looseleaf.ops.gather_kv import GATHERED_SIZE, KeySources
from looseleaf.ops.gather_kv.kernel import _gather_kv_kernel, gather_kv_triton
from looseleaf.ops.hopper.attention.kernel import Grid, _hopper_attention_kernel, launch
from looseleaf.ops.merge_states.kernel import _merge_states_kernel, merge_states_triton
from looseleaf.ops.packed_pages import BLOCK_BYTES
from looseleaf.ops.packed_pages.kernel import (
    _pack_pages_kernel,
    _unpack_pages_kernel,
    pack_pages_triton,
    unpack_pages_triton,
)
from looseleaf.ops.page_bounds.kernel import _page_bounds_kernel, page_bounds_triton
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.page_scores import LayerRules
from looseleaf.ops.page_scores.kernel import _page_scores_kernel, page_scores_triton
from looseleaf.ops.partial_attention.kernel import (
    _partial_attention_kernel,
    partial_attention_triton,
)
from looseleaf.ops.prefill_attention import SpanList
from looseleaf.ops.prefill_attention.kernel import (
    _prefill_attention_kernel,
    prefill_attention_triton,
)
from looseleaf.ops.rotate.kernel import _rotate_kernel, rotate_triton
from looseleaf.ops.select_pages.kernel import _select_pages_kernel, select_pages_triton
from looseleaf.ops.store_kv import NewRows
from looseleaf.ops.store_kv.kernel import _store_kv_kernel, store_kv_triton
from looseleaf.types import AttnState
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.candidates import (
    NUM_KV_HEADS,
    candidate_list,
    room_for,
    room_for_windows,
)
from looseleaf_lab.testing.compile import Compiled, compiling
from looseleaf_lab.testing.lists import span_list, work_list
from looseleaf_lab.testing.quantized import random_blocks
from looseleaf_lab.testing.scene import Scene, Shape

EVERY_FEATURE = Shape(
    masks=True, patches=True, soft_cap=5.0, window=40, alibi=True, interleaved=True
)
SHAPES = {
    "bf16-64": Shape(dtype=torch.bfloat16),
    "bf16-128": Shape(dtype=torch.bfloat16, head_dim=128, num_qo_heads=8),
    "bf16-80-features": replace(EVERY_FEATURE, dtype=torch.bfloat16, head_dim=80, rotary_dim=32),
    "fp16-256": Shape(dtype=torch.float16, head_dim=256, page_size=64),
    "fp16-128-features": replace(EVERY_FEATURE, dtype=torch.float16, head_dim=128),
    "fp32-32-mqa": Shape(num_qo_heads=7, num_kv_heads=1, head_dim=32, page_size=32),
    "fp32-96-features": replace(EVERY_FEATURE, head_dim=96),
    "fp32-256": Shape(head_dim=256, num_qo_heads=8),
}
KERNELS = (
    _add_sinks_kernel,
    _attention_received_kernel,
    _fetch_numbers_kernel,
    _fetch_turn_kernel,
    _finish_rows_kernel,
    _gather_kv_kernel,
    _merge_states_kernel,
    _pack_pages_kernel,
    _page_bounds_kernel,
    _page_scores_kernel,
    _partial_attention_kernel,
    _prefill_attention_kernel,
    _rms_norm_kernel,
    _rotate_kernel,
    _row_kernel,
    _select_pages_kernel,
    _silu_mul_kernel,
    _split_linear_kernel,
    _store_kv_kernel,
    _blocks_kernel,
    _unpack_pages_kernel,
)


def compiled(shape: Shape) -> Iterator[Compiled]:
    """All attention operators on a scene of this shape, and a layer's other ones in its dtype."""
    # many rows, so that the widest tiles are compiled
    shape = replace(shape, num_requests=40, longest_tail=8)
    with compiling(*KERNELS) as kernels:
        scene = SceneBuilder(0, shape).decode()
        rest = scene.rotation, scene.rule, scene.slot_positions if shape.patches else None
        work = work_list(scene)
        partial_attention_triton(scene.q, scene.k_pages, scene.v_pages, work, *rest)
        state = AttnState(torch.zeros(1, *scene.q.shape[1:]), torch.zeros(1, scene.q.shape[1]))
        out = torch.empty_like(scene.q)
        merge_states_triton(state, work.row_state_indptr, state, out)
        add_sinks_triton(AttnState(out, torch.zeros(out.shape[:2])), torch.zeros(out.shape[1]))
        own = replace(work, row_own=torch.zeros(4 * len(scene.q), dtype=torch.int32))
        finish_rows_triton(state, scene.q, (scene.k_pages, scene.v_pages), own, *rest[:2], out)
        positions = torch.arange(len(scene.q))
        rotate_triton(scene.q, positions, scene.rotation)
        k = scene.q[:, : shape.num_kv_heads]
        store_kv_triton(k, k, positions, positions, scene.rotation, scene.k_pages, scene.v_pages)
        _compile_gather(scene, scene.k_pages, shape.dtype)

        scene, rows_of, spans_of = SceneBuilder(0, shape).prefill()
        rest = scene.rotation, scene.rule, scene.slot_positions if shape.patches else None
        spans = span_list(scene, rows_of, spans_of, tile_rows=64)
        prefill_attention_triton(scene.q, scene.k_pages, scene.v_pages, spans, *rest)
        _compile_received(scene, spans, scene.k_pages)
        _compile_layer(shape.dtype)
        _compile_selection(shape)
    yield from kernels


def _compile_gather(scene: Scene, pages: torch.Tensor, dtype: torch.dtype) -> None:
    """Keys of some slots, as rows of this dtype read them."""
    numbers = torch.zeros(GATHERED_SIZE, dtype=torch.int32)
    heads, head_dim = pages.shape[1], pages.shape[3]
    gathered = torch.empty(1, heads, GATHERED_SIZE, head_dim, dtype=dtype)
    sources = KeySources(numbers, numbers)
    gather_kv_triton(pages, pages, sources, scene.rotation, gathered, gathered.clone())


def _compile_received(scene: Scene, spans: SpanList, k_pages: torch.Tensor) -> None:
    """What keys receive from all rows of a scene."""
    rows = len(scene.q)
    lse = torch.zeros(scene.q.shape[:2])
    readers = Readers(scene.q, lse, torch.ones(rows), torch.zeros(rows, dtype=torch.int32))
    attention_received_triton(readers, k_pages, spans, 64, scene.rotation, scene.rule)


def _compile_selection(shape: Shape) -> None:
    """The choice of pages, for queries and pages of this shape."""
    scene = SceneBuilder(0, replace(shape, num_kv_heads=NUM_KV_HEADS)).decode()
    candidates = candidate_list(0, 2, 300)
    width = 2 * shape.head_dim
    vectors = torch.zeros(64, NUM_KV_HEADS, width, dtype=shape.dtype)
    page_bounds_triton(scene.k_pages[None], torch.ones(len(scene.k_pages), dtype=torch.int64))
    k, places = scene.q[:, :NUM_KV_HEADS], torch.arange(len(scene.q))
    new = NewRows(k, k, places, places, scene.k_pages, scene.v_pages)
    rules = LayerRules(scene.rotation, scene.rule, shape.page_size)
    scores = page_scores_triton(scene.q, vectors, candidates, candidates.num_pages, rules, 4, new)
    select_pages_triton(scores, candidates, room_for(candidates, 64, 8), None)
    select_pages_triton(scores, candidates, *room_for_windows(candidates, 64, 8, 3))
    work = work_list(scene)
    work = replace(work, page_seen=torch.zeros_like(work.page_indices))
    patch = scene.slot_positions if shape.patches else None
    rest = scene.rotation, scene.rule, patch
    partial_attention_triton(scene.q, scene.k_pages, scene.v_pages, work, *rest)


def _compile_layer(dtype: torch.dtype) -> None:
    """What else a layer launches; cut products are for 16 bits only."""
    stream, weight = torch.zeros(8, 512, dtype=dtype), torch.zeros(512, 512, dtype=dtype)
    silu_mul_triton(stream)
    parts = num_parts(stream, weight, 132)
    delta = split_linear_triton(stream, weight, parts) if parts else stream.clone()
    if parts:
        whole_linear_triton(stream, weight)
    rms_norm_triton(stream, weight[0], 1e-5, delta)
    if dtype.itemsize == 2:
        # of a branch that is normed before it is added, by a weight with an offset in it
        rms_norm_triton(stream, weight[0].float(), 1e-5)
    numbers = torch.zeros(300, dtype=torch.int32)
    fetch_numbers_triton(numbers, numbers.clone())
    turns = torch.zeros(2, num_blocks(len(numbers)) + len(numbers), dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int64)
    fetch_turn_triton(turns, torch.zeros(len(numbers), dtype=torch.int32), count)
    likeliest_triton(stream)
    if dtype is torch.bfloat16:
        _compile_packing()


def _compile_packing() -> None:
    pages = torch.zeros(2, 2, 3, 2, 16, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 2, 3, BLOCK_BYTES, dtype=torch.uint8)
    pack_pages_triton(pages, torch.arange(3), 40, packed, torch.zeros(1, dtype=torch.int32))
    unpack_pages_triton(packed, torch.zeros(3, dtype=torch.int32), 0, pages)
    unpack_pages_triton(packed, range(3), 0, pages)


def compiled_fp8(shape: Shape) -> Iterator[Compiled]:
    """What reads and writes pages of e4m3, for queries in the dtype of ``shape``."""
    shape = replace(shape, num_requests=40, longest_tail=8)
    with compiling(*KERNELS) as kernels:
        scene = SceneBuilder(0, shape).decode()
        rest = scene.rotation, scene.rule, scene.slot_positions if shape.patches else None
        pages = to_pages(scene.k_pages, FP8), to_pages(scene.v_pages, FP8)
        partial_attention_triton(scene.q, *pages, work_list(scene), *rest)
        positions, k = torch.arange(len(scene.q)), scene.q[:, : shape.num_kv_heads]
        store_kv_triton(k, k, positions, positions, scene.rotation, *pages)
        _compile_gather(scene, pages[0], shape.dtype)
        scene, rows_of, spans_of = SceneBuilder(0, shape).prefill()
        rest = scene.rotation, scene.rule, scene.slot_positions if shape.patches else None
        pages = to_pages(scene.k_pages, FP8), to_pages(scene.v_pages, FP8)
        spans = span_list(scene, rows_of, spans_of, tile_rows=64)
        prefill_attention_triton(scene.q, *pages, spans, *rest)
        _compile_received(scene, spans, pages[0])
    yield from kernels


def compiled_gated() -> Iterator[Compiled]:
    """The gated products, of that generation alone."""
    x, weight = torch.zeros(8, 512, dtype=torch.bfloat16), torch.zeros(256, 512).bfloat16()
    with compiling(_gated_linear_kernel) as kernels:
        gated_linear_gluon(x, weight)
    yield from kernels
    with compiling(_gated_several_kernel) as kernels:
        for rows in (65, 144, 160, 192):
            gated_linear_several(x[:1].expand(rows, -1).contiguous(), weight)
    yield from kernels
    with compiling(_gated_many_kernel) as kernels:
        gated_linear_many(x, weight)
    yield from kernels


def compiled_scaled() -> Iterator[Compiled]:
    """Products with codes, by that generation's instructions and without."""
    weight, kernels = torch.randn(128, 512), (_scaled_linear_kernel, _add_parts_kernel)
    vectors = (_one_vector_kernel, _scaled_vectors_kernel)
    with compiling(*kernels, _quantize_rows_kernel, *vectors) as binaries:
        for kind in ("fp8", "int8", "int4"):
            matrix = quantize(weight, kind)
            for rows in (1, 64):
                x = torch.zeros(rows, 512, dtype=torch.bfloat16)
                out = torch.empty(1, rows, 128, dtype=torch.bfloat16)
                launch_scaled(x, matrix, out, chained=True, words=True)
            scaled_linear_triton(x.half(), matrix)
            for rows in (1, 2) if kind != "int4" else ():
                launch_vectors(x[:rows], matrix, out[:, :rows], chained=True)
        quantize_rows_triton(x)
    yield from binaries


def compiled_planes() -> Iterator[Compiled]:
    """Products with GGUF's formats and their values: each branch, not each of their pairs."""
    cases = ("Q4_0", 1, torch.bfloat16), ("Q5_1", 64, torch.bfloat16), ("Q8_0", 1, torch.float16)
    blocks = ("Q4_K", 1, torch.bfloat16), ("Q6_K", 64, torch.bfloat16)
    numbers = torch.zeros(2, dtype=torch.int64)
    products = (_plane_linear_kernel, _plane_vectors_kernel)
    with compiling(*products, _dequantize_planes_kernel) as kernels:
        for name, rows, dtype in (*cases, *blocks):
            # units that fill steps of the loop, and units that do not
            columns, few = (512, 1) if rows == 1 else (768, 2)
            planes = split_planes(random_blocks(name, 64, columns), torch.device("cpu"))
            x, out = torch.zeros(rows, columns, dtype=dtype), torch.empty(1, rows, 64, dtype=dtype)
            launch_planes(x, planes, out)
            launch_plane_vectors(x[:few], planes, out[:, :few], TILE, chained=True)
            dequantize_planes_triton(planes, dtype, slice(0, 64) if rows > 1 else numbers)
    yield from kernels


def compiled_experts() -> Iterator[Compiled]:
    """Routers of both laws, and grouped products by tiles of all sizes."""
    laws = (
        ExpertConfig(128, 8, 768),
        ExpertConfig(
            **{"num_experts": 256, "top_k": 8, "intermediate_size": 768, "scoring": "sigmoid"},
            **{"selection_bias": True, "num_groups": 8, "top_groups": 4, "num_shared": 1},
        ),
        ExpertConfig(60, 4, 768, normalized=False, num_shared=4, shared_gate=True),
    )
    routing = (_route_kernel, _group_few_kernel, _count_kernel, _sum_kernel, _place_kernel)
    vectors = _gate_vectors_kernel, _down_vectors_kernel
    with compiling(*routing, _gate_kernel, _down_kernel, *vectors) as binaries:
        for law in laws:
            bias = torch.zeros(law.num_experts) if law.selection_bias else None
            for logits in (torch.zeros(4, 8, 320), torch.zeros(100, 320)):
                route_triton(logits, law, bias)
        hidden, inner, slots, experts = 2048, 768, 8, 2
        gate_up = torch.zeros(experts * 2 * inner, hidden, dtype=torch.bfloat16)
        down = torch.zeros(experts * hidden, inner, dtype=torch.bfloat16)
        # a tile of each size, and more pairs than one program sorts
        for rows in (1, 5, 20, 200):
            x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
            pairs = torch.zeros(rows, slots, dtype=torch.int32)
            routes = Routes(pairs, torch.zeros(rows, slots))
            expert_mlp_triton(x, gate_up, down, routes, experts, "silu", (None, None))
        biases = torch.zeros(len(gate_up)), torch.zeros(len(down))
        expert_mlp_triton(x.half(), gate_up.half(), down.half(), routes, experts, "gelu", biases)
        for kind, rows in (("fp8", 1), ("fp8", 200), ("int8", 1), ("int4", 1), ("int4", 200)):
            codes = quantize(gate_up.float(), kind), quantize(down.float(), kind)
            few = Routes(pairs[:rows], routes.weights[:rows])
            expert_mlp_triton(x[:rows], *codes, few, experts, "silu", (None, None))
        codes = [
            Mxfp4Matrix(
                torch.zeros(len(m), m.shape[1] // 2, dtype=torch.uint8),
                torch.zeros(len(m), m.shape[1] // 32, dtype=torch.uint8),
            )
            for m in (gate_up, down)
        ]
        for rows in (1, 200):
            few = x[:1].expand(rows, -1).contiguous()
            pairs = torch.zeros(rows, slots, dtype=torch.int32)
            slot_routes = Routes(pairs, torch.zeros(rows, slots))
            expert_mlp_triton(few, *codes, slot_routes, experts, ClampedSwiglu(), biases)
        _compile_vectors(codes, biases)
        wide = x.float(), gate_up.float(), down.float()
        expert_mlp_triton(*wide, routes, experts, "gelu_new", (None, None))
    yield from binaries


def _compile_vectors(codes: list[Mxfp4Matrix], biases: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Products of one row, and those of one, two and four, with MXFP4 without tensor cores."""
    gate_up, down = codes
    pairs = torch.zeros(4, dtype=torch.int32)
    groups = RowGroups(pairs, torch.zeros(2, 3, dtype=torch.int32))
    for average, dtype in ((0.25, torch.float16), (4, torch.bfloat16)):
        tile = few_tile(int(4 * average), 4)
        assert tile is not None
        x, values = torch.zeros(4, 2048, dtype=dtype), torch.zeros(4, 768, dtype=dtype)
        activation = ClampedSwiglu() if tile.rows > 1 else "silu"
        bias, down_bias = biases if tile.rows > 1 else (None, None)
        launch_gate(x, gate_up, bias, groups, values, activation, tile, chained=True)
        shares, out = torch.zeros(4, 1), torch.zeros(1, 4, 2048)
        launch_down(values, down, down_bias, shares, groups, out, tile, chained=True)


def compiled_groups(num_qo_heads: int) -> Iterator[Compiled]:
    """The same of heads of 128 in groups that are no power of two, which are turned another way."""
    shape = Shape(dtype=torch.bfloat16, head_dim=128, num_qo_heads=num_qo_heads, num_kv_heads=2)
    scene = SceneBuilder(0, shape).decode()
    pages, numbers = (scene.k_pages, scene.v_pages), torch.zeros(8, dtype=torch.int32)
    state = torch.empty_like(scene.q), torch.zeros(scene.q.shape[:2])
    rest = numbers, state, scene.rotation, scene.rule
    with compiling(_hopper_attention_kernel) as kernels:
        for num_lists, grid in ((5, Grid(1, 1)), (8, Grid(1, 2, in_parts=True))):
            launch(scene.q, pages, (numbers,) * num_lists, *rest, grid)
    yield from kernels


def compiled_hopper(head_dim: int) -> Iterator[Compiled]:
    """The kernel of the generation: decode with one computing group and with two, prefill with
    two, over gathered keys too, of rows with patches with one and with two, and in parts."""
    shape = Shape(dtype=torch.bfloat16, head_dim=head_dim, num_qo_heads=8)
    scene = SceneBuilder(0, shape).decode()
    pages, numbers = (scene.k_pages, scene.v_pages), torch.zeros(8, dtype=torch.int32)
    state = torch.empty_like(scene.q), torch.zeros(scene.q.shape[:2])
    rest = numbers, state, scene.rotation, scene.rule
    with compiling(_hopper_attention_kernel) as kernels:
        for num_lists, grid in (
            (5, Grid(1, 1)),
            (5, Grid(1, 2)),
            (8, Grid(1, 2)),
            (10, Grid(1, 1)),
            (10, Grid(1, 2)),
            (8, Grid(1, 2, in_parts=True)),
            (10, Grid(1, 1, in_parts=True)),
            (10, Grid(1, 2, in_parts=True)),
        ):
            launch(scene.q, pages, (numbers,) * num_lists, *rest, grid)
        gathered = scene.k_pages.new_empty((1, shape.num_kv_heads, GATHERED_SIZE, head_dim))
        launch(scene.q, (gathered, gathered.clone()), (numbers,) * 8, *rest, Grid(1, 2))
    yield from kernels


if __name__ == "__main__":
    for name, shape in SHAPES.items():
        for kernel in compiled(shape):
            print(json.dumps({"shape": name} | asdict(kernel)), flush=True)
    for name in ("bf16-128", "fp16-128-features"):
        for kernel in compiled_fp8(SHAPES[name]):
            print(json.dumps({"shape": f"{name}, fp8"} | asdict(kernel)), flush=True)
    for kernel in compiled_gated():
        print(json.dumps({"shape": "gated"} | asdict(kernel)), flush=True)
    for kernel in compiled_scaled():
        print(json.dumps({"shape": "scaled"} | asdict(kernel)), flush=True)
    for kernel in compiled_planes():
        print(json.dumps({"shape": "planes"} | asdict(kernel)), flush=True)
    for kernel in compiled_experts():
        print(json.dumps({"shape": "experts"} | asdict(kernel)), flush=True)
    for kernel in (*compiled_hopper(64), *compiled_groups(14)):
        print(json.dumps({"shape": "hopper"} | asdict(kernel)), flush=True)
