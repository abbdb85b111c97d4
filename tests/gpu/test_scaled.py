"""Quantized weights on a GPU: products within budgets, replayed, and the laws of reuse."""

from pathlib import Path

import pytest
import torch

from looseleaf import LLM, Document, Fuse, RequestOutput, SamplingParams, Select
from looseleaf.config import Quantize
from looseleaf.models import read_config
from looseleaf.models.checkpoint.weights import load_weights
from looseleaf.models.linear import unpack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.scaled_linear import dequantize, quantize, scaled_linear
from tests.checkpoints import make_checkpoint
from tests.models.scaled_files import FORMS, write_scaled

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
KINDS: tuple[Quantize, ...] = ("fp8", "int8", "int4")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 128, 129, 1000])
@pytest.mark.parametrize(("features", "columns"), [(192, 384), (4096, 14_336)])
def test_products_are_within_the_bound(
    kind: Quantize, rows: int, features: int, columns: int
) -> None:
    matrix = quantize(torch.randn(features, columns, device="cuda"), kind)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    truth = x.double() @ dequantize(matrix, torch.float64).T
    error = (scaled_linear(x, matrix).double() - truth).norm() / truth.norm()
    # rows in FP8 have three bits
    assert error < (0.04 if kind == "fp8" and rows > 4 else 0.006)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_multiplies_new_rows(kind: Quantize) -> None:
    matrix = quantize(torch.randn(256, 512, device="cuda"), kind)
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    scaled_linear(x, matrix)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_linear(x, matrix)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, scaled_linear(x, matrix))


@pytest.mark.parametrize("form", FORMS)
def test_stored_codes_stay_codes(tmp_path: Path, form: str) -> None:
    write_scaled(tmp_path, form)
    config = read_config(tmp_path)
    narrow = load_weights(tmp_path, config, torch.bfloat16, "cuda").layers[0]
    wide = load_weights(tmp_path, config, torch.float32, "cpu").layers[0]
    # groups of 64 are dequantized
    assert isinstance(narrow.down.weight, QuantizedWeight) == ("packed" not in form)
    for mine, other in ((narrow.qkv, wide.qkv), (narrow.down, wide.down)):
        expected = unpack(other.weight).to("cuda", torch.bfloat16)
        torch.testing.assert_close(unpack(mine.weight), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_reused_documents_give_the_answer_of_computed_ones(tmp_path: Path, kind: Quantize) -> None:
    make_checkpoint(tmp_path, "llama", max_position_embeddings=1024, **SHAPE)
    documents = [Document(f"document {n} " * 12) for n in range(3)]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
    with LLM(tmp_path, device="cuda", dtype="bfloat16", quantize=kind) as llm:
        weight = llm.engine.runner.model.weights.layers[0].down.weight
        assert isinstance(weight, QuantizedWeight)
        first, again, other = (
            llm.generate([[*order, "end"]], params)[0]
            for order in (documents, documents, documents[::-1])
        )
        assert again.reuse.document_tokens_computed == 0
        assert other.reuse.document_tokens_computed == 0
        assert_agree(first, again)


def assert_agree(output: RequestOutput, other: RequestOutput) -> None:
    """Equal log-probabilities up to the first other token."""
    for first, second in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
        assert first[0].logprob == pytest.approx(second[0].logprob, abs=0.1)
        if first[0].token_id != second[0].token_id:
            break


@pytest.mark.parametrize("kind", KINDS)
def test_whole_blends_whole_selections_and_tiers_change_no_answer(
    tmp_path: Path, kind: Quantize
) -> None:
    make_checkpoint(tmp_path, "llama", max_position_embeddings=2048, **SHAPE)
    texts = [f"document {n} " * 40 for n in range(3)]
    documents = [Document(text) for text in texts]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
    options = {"device": "cuda", "dtype": "bfloat16", "quantize": kind}
    with LLM(tmp_path, host_gib=0.05, staging_gib=0.01, **options) as llm:

        def answer(prompt: list[str | Document], **how: object) -> RequestOutput:
            return llm.generate([prompt], params, **how)[0]

        whole = answer([*(Document(text, context="prompt") for text in texts), "end"])
        blended = answer([*documents, "end"], fuse=Fuse("first", ratio=1.0))
        assert_agree(whole, blended)
        reused = answer([*documents, "end"])
        selected = answer([*documents, "end"], select=Select("quest", tokens=4096))
        assert_agree(reused, selected)
        assert llm.engine.tiers.flush(60)
        llm.engine.tiering.release_pages()
        llm.engine.store.evict_idle()
        loaded = answer([*documents, "end"])
        assert loaded.reuse.document_tokens_computed == 0
        assert_agree(reused, loaded)
        llm.engine.check()
