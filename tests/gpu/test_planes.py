"""GGUF's formats on a GPU: products within budgets, replayed, and a file that stays in its bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from looseleaf import LLM, Document, RequestOutput, SamplingParams
from looseleaf.models import find_checkpoint, read_config
from looseleaf.models.checkpoint.weights import load_weights
from looseleaf.models.linear import unpack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.plane_linear import (
    PlaneMatrix,
    dequantize_planes,
    plane_linear,
    split_planes,
)
from looseleaf.ops.dense.plane_linear.vectors import TILE, Tile
from looseleaf.ops.dense.plane_linear.vectors.kernel import launch_vectors
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.quantized import normal_blocks, random_blocks
from tests.checkpoints import make_model
from tests.models.gguf_files import write_gguf

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
CUDA = torch.device("cuda")
NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_has_the_values_of_the_blocks(name: str) -> None:
    blocks = random_blocks(name, 1024, 2048)
    planes = split_planes(blocks, CUDA)
    numbers = torch.randint(0, 1024, (77,), device=CUDA)
    with poisoned():
        for chosen in (slice(64, 1000), numbers):
            values = dequantize_planes(planes, torch.bfloat16, chosen)
            truth = dequantize_planes(planes, torch.float32, chosen, "reference")
            assert torch.equal(values, truth.bfloat16())
    assert torch.equal(dequantize_planes(planes, torch.float32).cpu(), blocks.dequantize())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 128, 129, 1000])
@pytest.mark.parametrize(("features", "columns"), [(192, 768), (4096, 14_336)])
def test_products_are_within_the_bound(name: str, rows: int, features: int, columns: int) -> None:
    matrices = [split_planes(normal_blocks(name, features, columns), CUDA)]
    if features == 192:
        matrices.append(split_planes(normal_blocks("Q6_K", 64, columns), CUDA))
    x = torch.randn(rows, columns, device=CUDA, dtype=torch.bfloat16)
    with poisoned():
        product = plane_linear(x, matrices)
    weight = torch.cat([dequantize_planes(m, torch.float32) for m in matrices])
    truth = x.double() @ weight.double().T
    assert (product.double() - truth).norm() / truth.norm() < 0.006


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_multiply_weights_that_are_not_rounded(
    name: str, rows: int, dtype: torch.dtype
) -> None:
    """Also of outliers and tiny inputs, in parts, with loads ahead and in other tiles."""
    features, columns = 4096, 14_336
    matrix = split_planes(normal_blocks(name, features, columns), CUDA)
    x = torch.randn(rows, columns, device=CUDA)
    x[:, ::7] *= 1e-4
    x[:, 5::1000] *= 1e4
    x = x.to(dtype)
    weight = dequantize_planes(matrix, torch.float32).double()
    truth = x.double() @ weight.T
    chained = torch.cuda.get_device_capability()[0] >= 9
    for tile, parts in (
        (TILE, 1),
        (TILE, 4),
        (replace(TILE, stages=3), 2),
        (Tile(16, 4, 4, 1, 4), 8),
    ):
        out = torch.full((parts, rows, features), torch.nan, device=CUDA)
        with poisoned():
            launch_vectors(x, matrix, out, tile, chained=chained)
        assert (out.sum(0).double() - truth).norm() / truth.norm() < 2e-6


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_replay_reads_new_rows(name: str) -> None:
    matrix = split_planes(normal_blocks(name, 256, 512), CUDA)
    x = torch.randn(2, 512, device=CUDA, dtype=torch.bfloat16)
    numbers = torch.tensor([5, 0, 9, 255], device=CUDA)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return plane_linear(x, [matrix]), dequantize_planes(matrix, torch.bfloat16, numbers)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = compute()
    x.copy_(torch.randn_like(x))
    numbers.copy_(numbers.flip(0) + 1 - (numbers.flip(0) == 255).long())
    graph.replay()
    for mine, other in zip(replayed, compute(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_file_stays_in_its_bits_and_answers_as_its_values(tmp_path: Path, kind: str) -> None:
    model = make_model("llama", max_position_embeddings=1024, **SHAPE)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    folder = find_checkpoint(path)
    config = read_config(folder)
    kept, plain = (
        load_weights(folder, config, torch.bfloat16, "cuda", packed=packed)
        for packed in (True, False)
    )
    pairs = [(kept.embedding, plain.embedding), (kept.lm_head.weight, plain.lm_head.weight)]
    for mine, other in zip(kept.layers, plain.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            pairs.append((getattr(mine, field).weight, getattr(other, field).weight))
    for narrow, wide in pairs:
        assert isinstance(narrow, QuantizedWeight)
        assert all(isinstance(part, PlaneMatrix) for part in narrow.parts)
        assert torch.equal(unpack(narrow), unpack(wide))
    documents = [Document("ab" * 40 + f" {n}") for n in range(3)]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
    with LLM(path, device="cuda", dtype="bfloat16") as llm:
        first, again, other_order = (
            llm.generate([[*order, "end"]], params)[0]
            for order in (documents, documents, documents[::-1])
        )
        assert again.reuse.document_tokens_computed == 0
        assert other_order.reuse.document_tokens_computed == 0
        _assert_agree(first, again)
        llm.engine.check()


def _assert_agree(output: RequestOutput, other: RequestOutput) -> None:
    """Equal log-probabilities up to the first other token."""
    for first, second in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
        assert first[0].logprob == pytest.approx(second[0].logprob, abs=0.1)
        if first[0].token_id != second[0].token_id:
            break


def test_loading_takes_little_more_memory_than_the_blocks() -> None:
    blocks = normal_blocks("Q4_K", 32_768, 4096)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    planes = split_planes(blocks, CUDA)
    assert torch.cuda.memory_allocated() - before <= 1.03 * blocks.nbytes + 2**21
    # sorting takes some bytes for each code of a slab
    assert torch.cuda.max_memory_allocated() - before <= planes.nbytes + 16 * 2**22
