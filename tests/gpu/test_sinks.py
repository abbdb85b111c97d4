"""Sinks, query factors and experts in MXFP4 on a GPU, at real sizes and by the engine."""

import pytest
import torch

from looseleaf import LLM, SamplingParams
from looseleaf.ops.add_sinks import add_sinks
from looseleaf.ops.experts.mlp import ClampedSwiglu, expert_mlp
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.route import Routes
from looseleaf.types import AttnState
from looseleaf_lab.testing.budget import assert_state_within_budget, assert_within_budget
from looseleaf_lab.testing.poison import poisoned
from tests.gpu.test_engine import PROMPTS
from tests.models.test_mxfp4 import mxfp4_checkpoint

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 64, 64), (300, 64, 64), (7, 40, 128)])
def test_the_sink_kernel_is_within_the_budget(dtype, rows, heads, head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    out = torch.randn(rows, heads, head_dim, device="cuda", generator=generator).to(dtype)
    lse = 8 * torch.randn(rows, heads, device="cuda", generator=generator)
    sinks = 8 * torch.randn(heads, device="cuda", generator=generator)
    truth = add_sinks(AttnState(out.double(), lse.double()), sinks.double(), "reference")
    # the merge is in place, and the conversion of fp32 makes no copy
    plain = add_sinks(AttnState(out.clone().float(), lse.clone()), sinks, "reference")
    actual = add_sinks(AttnState(out, lse), sinks)
    assert_state_within_budget(actual, truth, AttnState(plain.out.to(dtype), plain.lse), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "count"),
    # tiles of one, two and four rows without tensor cores, then with them
    [*((1, 32), (2, 32), (2, 8), (7, 8)), *((16, 8), (64, 8), (65, 8), (1024, 8))],
)
def test_products_of_mxfp4_at_the_sizes_of_gpt_oss(dtype, rows, count):
    hidden = inner = 2880
    slots = 4

    def matrix(features, columns):
        codes = torch.randint(0, 256, (features, columns // 2), dtype=torch.uint8, device="cuda")
        powers = torch.randint(118, 121, (features, columns // 32), device="cuda")
        return Mxfp4Matrix(codes, powers.to(torch.uint8))

    x = torch.randn(rows, hidden, device="cuda").to(dtype)
    gate_up, down = matrix(count * 2 * inner, hidden), matrix(count * hidden, inner)
    experts = torch.rand(rows, count, device="cuda").argsort(1)[:, :slots].int().contiguous()
    routes = Routes(experts, torch.rand(rows, slots, device="cuda"))
    options = {
        "activation": ClampedSwiglu(),
        "gate_up_bias": torch.randn(gate_up.features, device="cuda"),
        "down_bias": torch.randn(down.features, device="cuda"),
    }
    with poisoned():
        result = expert_mlp(x, gate_up, down, routes, **options)
    values = gate_up.dequantize(), down.dequantize()
    truth = expert_mlp(x.double(), *(v.double() for v in values), routes, "reference", **options)
    halves = [value.to(dtype) for value in values]
    # a plain one rounds inner values, as products in 16 bits do
    plain = sum(_plain(x, *halves, routes, options)).to(dtype)
    assert_within_budget(result.double().sum(0), truth[0], plain, dtype)


def _plain(x, gate_up, down, routes, options):
    """Each expert of each slot by the library's products in 16 bits."""
    count = len(down) // x.shape[1]
    gates, downs = gate_up.unflatten(0, (count, -1)), down.unflatten(0, (count, -1))
    biases = [options[name].unflatten(0, (count, -1)) for name in ("gate_up_bias", "down_bias")]
    for slot in range(routes.experts.shape[1]):
        out = torch.zeros(x.shape, device=x.device)
        for expert in range(count):
            rows = routes.experts[:, slot] == expert
            gate, up = ((x[rows] @ gates[expert].T).float() + biases[0][expert]).chunk(2, 1)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
            product = (inner @ downs[expert].T).float() + biases[1][expert]
            out[rows] = product * routes.weights[rows, slot, None]
        yield out


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_answers_of_mxfp4_are_the_same_with_graphs_and_without(tmp_path, dtype):
    mxfp4_checkpoint(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    answers = []
    for cuda_graphs in (True, False):
        llm = LLM(tmp_path, dtype=dtype, device="cuda", num_pages=128, cuda_graphs=cuda_graphs)
        outputs = llm.generate(PROMPTS, params)
        llm.engine.check()
        answers.append([entry[0].logprob for o in outputs for entry in o.outputs[0].logprobs[:1]])
    on_cpu = LLM(tmp_path, dtype="float32", device="cpu", num_pages=128, cpu_kernels="torch")
    outputs = on_cpu.generate(PROMPTS, params)
    exact = torch.tensor([entry[0].logprob for o in outputs for entry in o.outputs[0].logprobs[:1]])
    graphs, plain = map(torch.tensor, answers)
    assert (graphs - plain).abs().max() < 0.1
    assert (graphs - exact).abs().max() < 0.2
