"""Mixtures of experts on a GPU: products within budgets, replayed, quantized, and laws of reuse."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams
from looseleaf.config import ExpertConfig
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.scaled_linear import Codes, dequantize, quantize
from looseleaf.ops.experts.group import group_rows
from looseleaf.ops.experts.mlp import expert_mlp
from looseleaf.ops.experts.route import Routes, route
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.poison import poisoned
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
QWEN3 = ExpertConfig(128, 8, 768)
GLM = ExpertConfig(
    **{"num_experts": 64, "top_k": 4, "intermediate_size": 256, "scoring": "sigmoid"},
    **{"selection_bias": True, "num_groups": 8, "top_groups": 3, "num_shared": 1},
)
MIXTRAL = ExpertConfig(8, 2, 1408)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)


def mixture(
    rows: int, hidden: int, law: ExpertConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Routes]:
    """Rows, gate and up, down, and routes; rows lie apart in memory."""
    inner, count = law.intermediate_size, law.num_stored
    x = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
    gate_up = torch.randn(count * 2 * inner, hidden, device="cuda") * hidden**-0.5
    down = torch.randn(count * hidden, inner, device="cuda") * inner**-0.5
    bias = torch.randn(law.num_experts, device="cuda") if law.selection_bias else None
    routes = route(torch.randn(rows, law.num_experts, device="cuda"), law, bias)
    return x, gate_up.to(dtype), down.to(dtype), routes


@pytest.mark.parametrize("law", [QWEN3, GLM, MIXTRAL], ids=["Qwen3", "GLM", "Mixtral"])
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 700, 4096])
def test_routes_and_groups_are_those_of_the_reference(law: ExpertConfig, rows: int) -> None:
    logits = torch.randn(rows, 192, device="cuda")
    bias = torch.randn(law.num_experts, device="cuda") if law.selection_bias else None
    result, expected = (route(logits, law, bias, kind) for kind in ("triton", "reference"))
    # the exponential of a score differs by an ulp, which may order two equal scores another way
    same = (result.experts == expected.experts).float().mean()
    assert same > 0.999
    for tile in (16, 128):
        groups = [
            group_rows(result.experts, law.num_stored, tile, k) for k in ("triton", "reference")
        ]
        assert torch.equal(groups[0].order, groups[1].order)
        assert torch.equal(groups[0].tiles, groups[1].tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("law", [QWEN3, GLM, MIXTRAL], ids=["Qwen3", "GLM", "Mixtral"])
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 200, 600, 3000])
def test_products_are_within_the_budget(law: ExpertConfig, rows: int, dtype: torch.dtype) -> None:
    x, gate_up, down, routes = mixture(rows, 512, law, dtype)
    with poisoned():
        result = expert_mlp(x, gate_up, down, routes)
    wide = (matrix.double() for matrix in (x, gate_up, down))
    truth = expert_mlp(*wide, routes, "reference")[0]
    rounded = expert_mlp(x, gate_up, down, routes, "reference")[0].to(dtype)
    # inner values are rounded too
    budget_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    assert_within_budget(result.double().sum(0), truth, rounded, budget_dtype)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 16, 64, 300, 2000])
def test_products_with_codes_are_those_of_their_values(kind: Codes, rows: int) -> None:
    x, gate_up, down, routes = mixture(rows, 512, GLM, torch.bfloat16)
    codes = [quantize(matrix, kind).laid_out() for matrix in (gate_up, down)]
    values = [dequantize(matrix, torch.float64) for matrix in codes]
    truth = expert_mlp(x.double(), *values, routes, "reference")[0]
    error = (expert_mlp(x, *codes, routes).double().sum(0) - truth).norm() / truth.norm()
    assert error < 0.006


@pytest.mark.parametrize("rows", [3, 48, 512])
def test_a_replay_routes_and_multiplies_new_rows(rows: int) -> None:
    x, gate_up, down, _ = mixture(rows, 512, QWEN3, torch.bfloat16)
    router = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)

    def layer() -> Tensor:
        logits = torch.mm(x, router.t(), out_dtype=torch.float32)
        return expert_mlp(x, gate_up, down, route(logits, QWEN3)).sum(0)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, layer())


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "mixtral"])
def test_tokens_are_the_same_with_graphs_and_without(tmp_path: Path, family: str) -> None:
    folder, prompts = make_checkpoint(tmp_path, family), ["one", "two texts", "a third"]
    params = [SamplingParams(max_tokens=40, seed=n, ignore_eos=True) for n in range(3)]
    answers = []
    for cuda_graphs in (True, False):
        options = {"device": "cuda", "dtype": "float32", "num_pages": 128}
        with LLM(folder, cuda_graphs=cuda_graphs, **options) as llm:
            outputs = llm.generate(prompts, params)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("quantize", [None, "fp8", "int4"])
def test_reused_documents_give_the_answer_of_computed_ones(
    tmp_path: Path, quantize: Codes | None
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "max_position_embeddings": 1024}
    make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    documents = [Document(f"document {n} " * 12) for n in range(3)]
    with LLM(tmp_path, device="cuda", dtype="bfloat16", quantize=quantize) as llm:
        weight = llm.engine.runner.model.weights.layers[0].gate_up.weight
        assert isinstance(weight, QuantizedWeight) == (quantize is not None)
        first, again, other = (
            llm.generate([[*order, "end"]], PARAMS)[0]
            for order in (documents, documents, documents[::-1])
        )
        assert again.reuse.document_tokens_computed == 0
        assert other.reuse.document_tokens_computed == 0
        for cold, warm in zip(first.outputs[0].logprobs, again.outputs[0].logprobs, strict=True):
            assert cold[0].logprob == pytest.approx(warm[0].logprob, abs=0.1)
