"""Laws of mixtures of experts: the router, rows by expert, and grouped products."""

import math

import pytest
import torch
from torch import Tensor

from looseleaf.config import ExpertConfig
from looseleaf.errors import InvalidOption
from looseleaf.ops.dense.quantized_linear import PackedMatrix
from looseleaf.ops.dense.scaled_linear import Codes, dequantize, quantize
from looseleaf.ops.dispatch import Implementation
from looseleaf.ops.experts.group import group_rows, most_tiles
from looseleaf.ops.experts.mlp import (
    FEW_ROWS,
    Activation,
    ClampedSwiglu,
    expert_mlp,
    rows_of_kernels,
    tile_rows,
)
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.mlp.native import expert_mlp_native
from looseleaf.ops.experts.mlp.vectors import Tile, few_tile
from looseleaf.ops.experts.route import Routes, route
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.quantized import normal_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAWS = {
    "Mixtral": ExpertConfig(8, 2, 64),
    "Qwen3": ExpertConfig(12, 3, 64),
    "OLMoE": ExpertConfig(64, 8, 64, normalized=False),
    "Qwen2": ExpertConfig(6, 2, 64, normalized=False, num_shared=4, shared_gate=True),
    "DeepSeek V2": ExpertConfig(
        20, 4, 64, normalized=False, scaling=16.0, num_groups=4, top_groups=2, group_scores=1
    ),
    "DeepSeek V3": ExpertConfig(
        **{"num_experts": 32, "top_k": 4, "intermediate_size": 64, "scoring": "sigmoid"},
        **{"scaling": 2.5, "selection_bias": True, "num_groups": 8, "top_groups": 3},
        num_shared=1,
    ),
}


def drawn(rows: int, law: ExpertConfig, parts: int = 0) -> tuple[Tensor, Tensor | None]:
    """Logits with columns to spare, and a bias of the choice if the law has one."""
    shape = (parts, rows) if parts else (rows,)
    logits = torch.randn(*shape, -(-(law.num_experts + 1) // 64) * 64, device=DEVICE)
    bias = torch.randn(law.num_experts, device=DEVICE) if law.selection_bias else None
    return logits, bias


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("rows", "parts"), [(0, 0), (1, 4), (5, 0), (66, 0)])
def test_the_kernel_routes_as_the_reference(name: str, rows: int, parts: int) -> None:
    law = LAWS[name]
    logits, bias = drawn(rows, law, parts)
    expected, result = (route(logits, law, bias, kind) for kind in ("reference", "triton"))
    assert torch.equal(result.experts, expected.experts)
    torch.testing.assert_close(result.weights, expected.weights)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", LAWS)
def test_a_row_has_each_expert_once_and_normalized_weights_add_up(
    name: str, implementation: Implementation
) -> None:
    law = LAWS[name]
    experts, weights = route(*_with(law, drawn(9, law)), implementation)
    assert all(len(set(row)) == law.num_slots for row in experts.tolist())
    assert int(experts.min()) >= 0 and int(experts.max()) < law.num_stored
    assert experts[:, law.top_k :].unique().tolist() == [*range(law.num_experts, law.num_stored)]
    if law.normalized:
        total = torch.full((9,), law.scaling, device=DEVICE)
        torch.testing.assert_close(weights[:, : law.top_k].sum(1), total)


def _with(
    law: ExpertConfig, drawn: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, ExpertConfig, Tensor | None]:
    return drawn[0], law, drawn[1]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_bias_changes_the_choice_and_no_weight(implementation: Implementation) -> None:
    law = ExpertConfig(4, 1, 64, scoring="sigmoid", normalized=False, selection_bias=True)
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0], device=DEVICE)
    routes = route(torch.zeros(2, 4, device=DEVICE), law, bias, implementation)
    assert routes.experts.tolist() == [[2], [2]]
    assert routes.weights.tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_of_equal_scores_the_first_experts_win(implementation: Implementation) -> None:
    routes = route(torch.zeros(3, 12, device=DEVICE), LAWS["Qwen3"], None, implementation)
    assert routes.experts.tolist() == [[0, 1, 2]] * 3


def test_rows_without_numbers_choose_experts_that_exist() -> None:
    for name, law in LAWS.items():
        logits, bias = drawn(2, law)
        experts = route(logits.fill_(float("nan")), law, bias, "triton").experts
        assert int(experts.min()) >= 0 and int(experts.max()) < law.num_stored, name


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(
    ("rows", "slots", "num_experts"), [(0, 2, 4), (1, 8, 128), (37, 3, 5), (64, 8, 9), (700, 4, 33)]
)
def test_the_kernel_groups_as_the_reference(
    rows: int, slots: int, num_experts: int, tile: int
) -> None:
    experts = torch.randint(0, num_experts, (rows, slots), dtype=torch.int32, device=DEVICE)
    expected, result = (group_rows(experts, num_experts, tile, k) for k in ("reference", "triton"))
    assert torch.equal(result.order, expected.order)
    assert torch.equal(result.tiles, expected.tiles)
    assert len(result.tiles) == most_tiles(rows * slots, num_experts, tile)


@pytest.mark.parametrize("num_experts", [1, 7, 50])
def test_the_bound_of_tiles_holds_for_the_worst_rows(num_experts: int) -> None:
    # one pair for each expert but the last, which has all others
    for pairs in range(1, 120):
        alone = torch.arange(min(pairs, num_experts))
        rest = torch.full((pairs - len(alone),), len(alone) - 1)
        experts = torch.cat([alone, rest]).int()[:, None]
        groups = group_rows(experts, num_experts, 8, "reference")
        assert int((groups.tiles[:, 0] >= 0).sum()) <= most_tiles(pairs, num_experts, 8)
        assert len(groups.tiles) == most_tiles(pairs, num_experts, 8)


def mixture(
    rows: int, hidden: int, inner: int, law: ExpertConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Routes]:
    """Rows, gate and up, down, and routes; rows lie apart in memory."""
    count = law.num_stored
    x = torch.randn(rows, hidden + 8, device=DEVICE).to(dtype)[:, :hidden]
    gate_up = (torch.randn(count * 2 * inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    down = (torch.randn(count * hidden, inner, device=DEVICE) * inner**-0.5).to(dtype)
    logits, bias = drawn(rows, law)
    return x, gate_up, down, route(logits, law, bias, "reference")


# a limit that clips some values
CLIP = ClampedSwiglu(1.702, 0.8)
SMALL = ExpertConfig(4, 2, 64, normalized=False, num_shared=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "activation"),
    [
        *((0, 64, 64, "silu"), (1, 128, 64, "gelu"), (5, 72, 40, "silu")),
        *((20, 64, 128, "gelu_new"), (6, 64, 64, CLIP)),
    ],
)
def test_grouped_products_are_within_the_budget(
    rows: int, hidden: int, inner: int, dtype: torch.dtype, activation: Activation
) -> None:
    x, gate_up, down, routes = mixture(rows, hidden, inner, SMALL, dtype)
    with poisoned():
        result = expert_mlp(x, gate_up, down, routes, "triton", activation=activation)
    assert result.shape == (SMALL.num_slots, rows, hidden)
    wide = [matrix.double() for matrix in (x, gate_up, down)]
    truth = expert_mlp(*wide, routes, "reference", activation=activation)[0]
    plain = expert_mlp(x, gate_up, down, routes, "reference", activation=activation)[0]
    assert_within_budget(result.double().sum(0), truth, plain.to(dtype), dtype)


@pytest.mark.parametrize(("slots", "count"), [(4, 32), (4, 128), (8, 128), (2, 8), (8, 512)])
def test_warmup_launches_the_kernels_of_all_numbers_of_rows(slots: int, count: int) -> None:
    def kernels(rows: int) -> tuple[Tile | None, int, bool]:
        pairs = rows * slots
        return few_tile(pairs, count), tile_rows(pairs, count), rows <= FEW_ROWS

    expected = {kernels(rows) for rows in range(1, 200 * count // slots)}
    assert {kernels(rows) for rows in rows_of_kernels(slots, count)} == expected


@pytest.mark.parametrize("rows", [7, 30, 100, 200])
def test_every_size_of_tile_gives_the_reference(rows: int) -> None:
    law = ExpertConfig(2, 2, 32)
    x, gate_up, down, routes = mixture(rows, 64, 32, law, torch.float16)
    result = expert_mlp(x, gate_up, down, routes, "triton").double().sum(0)
    truth = expert_mlp(x.double(), gate_up.double(), down.double(), routes, "reference")[0]
    plain = expert_mlp(x, gate_up, down, routes, "reference")[0].half()
    assert_within_budget(result, truth, plain, torch.float16)


def test_biases_are_added_before_the_activation_and_before_the_weight() -> None:
    law = ExpertConfig(3, 2, 32)
    x, gate_up, down, routes = mixture(4, 64, 32, law, torch.float32)
    biases = {
        "gate_up_bias": torch.randn(len(gate_up), device=DEVICE),
        "down_bias": torch.randn(len(down), device=DEVICE),
    }
    result = expert_mlp(x, gate_up, down, routes, "triton", **biases).sum(0)
    expected = torch.zeros_like(x)
    gates, downs = gate_up.view(3, 64, 64), down.view(3, 64, 32)
    gate_bias, down_bias = biases["gate_up_bias"].view(3, 64), biases["down_bias"].view(3, 64)
    for row, (experts, weights) in enumerate(zip(*routes, strict=True)):
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            gate, up = (gates[expert] @ x[row] + gate_bias[expert]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            expected[row] += weight * (downs[expert] @ inner + down_bias[expert])
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("rows", [5, 40])
def test_products_with_codes_are_those_of_their_values(kind: Codes, rows: int) -> None:
    law = ExpertConfig(2, 2, 128)
    x, gate_up, down, routes = mixture(rows, 256, 128, law, torch.float16)
    codes = [quantize(matrix, kind).laid_out() for matrix in (gate_up, down)]
    result = expert_mlp(x, *codes, routes, "triton").double().sum(0)
    values = [dequantize(matrix, torch.float64) for matrix in codes]
    truth = expert_mlp(x.double(), *values, routes, "reference")[0]
    plain = expert_mlp(x, *[v.half() for v in values], routes, "reference")[0].half()
    assert_within_budget(result, truth, plain, torch.float16)


def test_groups_of_a_row_have_their_own_scales() -> None:
    law = ExpertConfig(2, 1, 256)
    x, gate_up, down, routes = mixture(3, 256, 256, law, torch.float16)
    codes = [quantize(matrix, "int4", 256) for matrix in (gate_up, down)]
    fine = [quantize(matrix, "int4", 128) for matrix in (gate_up, down)]
    results = [expert_mlp(x, *m, routes, "triton").sum(0) for m in (codes, fine)]
    expected = [expert_mlp(x, *m, routes, "reference")[0] for m in (codes, fine)]
    for mine, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0.01, atol=0.01)
    assert not torch.allclose(*expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "rows"), [("Q8_0", 1), ("Q4_K", 5), ("BF16", 40)])
def test_c_kernels_give_the_experts_in_turn(name: str, rows: int, dtype: torch.dtype) -> None:
    law = ExpertConfig(5, 3, 256)
    matrices = [normal_blocks(name, law.num_stored * n, 256) for n in (512, 256)]
    gate_up, down = (PackedMatrix(m.blocks, m.layout, dtype) for m in matrices)
    x, routes = torch.randn(rows, 264).to(dtype)[:, :256], route(torch.randn(rows, 5), law)
    expected = torch.zeros(rows, 256)
    for expert in range(5):
        own, slots = (routes.experts == expert).nonzero(as_tuple=True)
        parts = (
            gate_up.part(slice(512 * expert, 512 * (expert + 1))),
            down.part(slice(256 * expert, 256 * (expert + 1))),
        )
        inner = parts[0].multiply(x[own], torch.empty(len(own), 256, dtype=dtype), gated=True)
        product = parts[1].multiply(inner, torch.empty(len(own), 256, dtype=dtype)).float()
        expected.index_add_(0, own, product * routes.weights[own, slots, None])
    result = expert_mlp_native(x, gate_up, down, routes)
    torch.testing.assert_close(result, expected.to(dtype))
    with pytest.raises(InvalidOption, match="can't take"):
        expert_mlp_native(x[:, :64], gate_up, down, routes)


def mxfp4(features: int, columns: int) -> Mxfp4Matrix:
    """Any codes, with values of about ``columns ** -0.5``."""
    codes = torch.randint(0, 256, (features, columns // 2), dtype=torch.uint8, device=DEVICE)
    middle = 127 - round(math.log2(columns) / 2) - 1
    size = (features, columns // 32)
    return Mxfp4Matrix(
        codes, torch.randint(middle - 1, middle + 2, size, dtype=torch.uint8, device=DEVICE)
    )


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "count"),
    # tiles of one and two rows, and those of tensor cores
    [(1, 96, 32, 16), (2, 128, 64, 4), (40, 64, 96, 4), (200, 64, 64, 4)],
)
def test_products_of_mxfp4_are_those_of_its_values(
    rows: int, hidden: int, inner: int, count: int
) -> None:
    law = ExpertConfig(count, 2, inner, router_bias=True, expert_bias=True)
    x, _, _, routes = mixture(rows, hidden, inner, law, torch.float16)
    gate_up, down = mxfp4(count * 2 * inner, hidden), mxfp4(count * hidden, inner)
    options = {
        "activation": ClampedSwiglu(),
        "gate_up_bias": torch.randn(gate_up.features, device=DEVICE),
        "down_bias": torch.randn(down.features, device=DEVICE),
    }
    with poisoned():
        result = expert_mlp(x, gate_up, down, routes, "triton", **options)
    values = gate_up.dequantize(), down.dequantize()
    wide = [matrix.double() for matrix in (x, *values)]
    truth = expert_mlp(*wide, routes, "reference", **options)[0]
    # values of MXFP4 are numbers of 16 bits
    halves = [value.half() for value in values]
    assert all(torch.equal(h.float(), v) for h, v in zip(halves, values, strict=True))
    plain = expert_mlp(x, *halves, routes, "reference", **options)[0].half()
    assert_within_budget(result.double().sum(0), truth, plain, torch.float16)
    same = expert_mlp(x, gate_up, down, routes, "reference", **options)[0].half()
    assert torch.equal(same, plain)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiler has one order of dims")
@pytest.mark.parametrize(("dtype", "flip"), [(torch.float16, True), (torch.bfloat16, False)])
def test_tiles_of_one_to_four_rows_multiply_mxfp4(
    dtype: torch.dtype, flip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from looseleaf.ops.experts.mlp.vectors.kernel import expert_vectors_triton

    monkeypatch.setattr("looseleaf.ops.experts.mlp.vectors.kernel.SPREADS_FIRST", flip)
    # two steps of the first product, the last with blocks behind the end
    hidden, inner, count = 288, 32, 3
    order = torch.arange(count).repeat_interleave(torch.tensor([1, 2, 7]))
    experts = order[torch.randperm(len(order))].int()[:, None].to(DEVICE)
    routes = Routes(experts, torch.rand(experts.shape, device=DEVICE))
    x = torch.randn(len(experts), hidden + 8, device=DEVICE).to(dtype)[:, :hidden]
    gate_up, down = mxfp4(count * 2 * inner, hidden), mxfp4(count * hidden, inner)
    # the smallest power
    gate_up.scales[0, 0] = 0
    with poisoned():
        result = expert_vectors_triton(
            x, (gate_up, down), routes, count, "silu", (None, None), Tile(4, 8, 1, 2)
        )
    wide = x.double(), gate_up.dequantize().double(), down.dequantize().double()
    truth = expert_mlp(*wide, routes, "reference")[0]
    # inner values are rounded, as products in 16 bits do
    plain = torch.zeros_like(truth)
    for row, expert in enumerate(experts[:, 0].tolist()):
        gates, downs = (matrix.unflatten(0, (count, -1))[expert] for matrix in wide[1:])
        gate, up = (gates @ wide[0][row]).chunk(2)
        product = (torch.nn.functional.silu(gate) * up).to(dtype).double()
        plain[row] = downs @ product * routes.weights[row]
    assert_within_budget(result.double().sum(0), truth, plain.to(dtype), dtype)


def test_mxfp4_needs_rows_of_16_bits_on_a_gpu() -> None:
    law = ExpertConfig(4, 2, 64)
    x, _, _, routes = mixture(3, 64, 64, law, torch.float32)
    with pytest.raises(InvalidOption, match="16 bits"):
        expert_mlp(x, mxfp4(512, 64), mxfp4(256, 64), routes, "triton")
