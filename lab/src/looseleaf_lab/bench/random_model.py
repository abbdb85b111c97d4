"""Engines over random weights of real shapes, created on the device without a checkpoint file.

For speed only: the answers of a random model are meaningless."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import EngineConfig, ModelConfig, Quantize
from looseleaf.engine.engine import Engine
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import LoadedModel, make_engine, reference_model
from looseleaf.models import Decoder, Tokenizer
from looseleaf.models.checkpoint.expert_tensors import padded_router
from looseleaf.models.layers import DecoderWeights, LatentWeights, LayerWeights, Norm, Router
from looseleaf.models.linear import Projection, pack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.rms_norm.native import has_native_norm
from looseleaf.ops.dense.scaled_linear import quantize as quantize_matrix
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.parallel import Ranks
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.testing.quantized import normal_blocks


def random_decoder(
    shape: str,
    device: torch.device,
    quantize: Quantize | None = None,
    blocks: str | None = None,
) -> Decoder:
    """A model with random weights in the shape's dtype; several engines may share it.

    ``quantize`` narrows the matrices of layers, as the engine's option does. With ``blocks``, all
    matrices are in that GGUF format. Raises InvalidOption for a shape that is not in
    `MODEL_SHAPES`, for both forms, and for experts in blocks on a GPU, which have 16 bits there.
    """
    model = model_shape(shape)
    if blocks is not None and (quantize is not None or (model.experts and device.type == "cuda")):
        raise InvalidOption(
            "blocks are another form than quantize, and experts have 16 bits on a GPU: leave one "
            "of the options out, or take a dense shape"
        )
    dtype = getattr(torch, model.torch_dtype)
    return Decoder(model, random_weights(model, dtype, device, blocks, quantize))


def random_engine(
    shape: str, config: EngineConfig, device: torch.device, decoder: Decoder | None = None
) -> Engine:
    """An engine over random weights, or over ``decoder``'s. Prompts must be token ids.

    Raises InvalidOption for a shape that is not in `MODEL_SHAPES`.
    """
    model, folder = model_shape(shape), reference_model()
    loaded = LoadedModel(
        folder,
        model,
        decoder or random_decoder(shape, device),
        Tokenizer(folder),
        f"random {shape}".encode(),
        config.max_model_len or model.max_position_embeddings,
    )
    return make_engine(loaded, config)


def random_rank(
    shape: str, quantize: Quantize | None, config: EngineConfig, ranks: Ranks | None = None
) -> Engine:
    """An engine over random weights, one of ``ranks`` or the only one. Prompts must be token ids.

    ``quantize`` narrows the matrices of layers on a GPU."""
    model, folder, device = model_shape(shape), reference_model(), torch.device(config.device)
    length = config.max_model_len or model.max_position_embeddings
    local = model.frozen_at(length)
    if ranks is not None:
        ranks.shard.require(local)
        local = ranks.shard.local(local)
    dtype = getattr(torch, model.torch_dtype)
    weights = random_weights(local, dtype, device, quantize=quantize, ranks=ranks)
    tokenizer, name = Tokenizer(folder), f"random {shape}".encode()
    loaded = LoadedModel(folder, local, Decoder(local, weights), tokenizer, name, length)
    return make_engine(loaded, config)


def _mxfp4(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Projection:
    """Experts in MXFP4, with values of about ``columns ** -0.5``."""
    device = generator.device
    if device.type != "cuda":
        return Projection(QuantizedWeight.create([normal_blocks("MXFP4", rows, columns)], dtype))
    size = (rows, columns // 2)
    codes = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=device)
    # the mean square of the 16 floats is about 2 ** 3
    power = 127 - round(math.log2(columns) / 2 + 1.5)
    scales = torch.full((rows, columns // 32), power, dtype=torch.uint8, device=device)
    return Projection(QuantizedWeight([Mxfp4Matrix(codes, scales)], dtype))


def _with_biases(layer: LayerWeights, model: ModelConfig, device: torch.device) -> LayerWeights:
    """``layer`` with the biases and sinks of its model, all 0."""

    def biased(plain: Projection, has_bias: bool) -> Projection:
        weight = plain.weight
        # quantized products add their bias in fp32
        dtype = torch.float32 if isinstance(weight, QuantizedWeight) else weight.dtype
        zeros = torch.zeros(weight.shape[0], dtype=dtype, device=device)
        return plain._replace(bias=zeros) if has_bias else plain

    law, router = model.experts, layer.router
    of_experts = law is not None and law.expert_bias and router is not None
    if router is not None and law is not None and law.router_bias:
        router = router._replace(bias=torch.zeros(law.num_experts, device=device))
    return replace(
        layer,
        qkv=biased(layer.qkv, model.qkv_bias),
        output=biased(layer.output, model.output_bias),
        gate_up=biased(layer.gate_up, of_experts),
        down=biased(layer.down, of_experts),
        router=router,
        sinks=torch.zeros(model.num_qo_heads, device=device) if model.sinks else None,
    )


def fused_features(model: ModelConfig) -> int:
    """Features of a layer's first projection."""
    shape = model.latent
    if shape is None:
        return (model.num_qo_heads + 2 * model.num_kv_heads) * model.head_dim
    return (shape.query_rank or model.num_qo_heads * shape.query_dim) + shape.key_dim


def random_latent(
    model: ModelConfig,
    random_weight: Callable[[int, int], Tensor],
    norm: Callable[[int], Norm],
    projection: Callable[[int, int], Projection],
) -> LatentWeights | None:
    """The maps of latent attention from weights of these kinds; None without such attention."""
    shape, heads = model.latent, model.num_qo_heads
    if shape is None:
        return None
    key_up = random_weight(heads * shape.nope_dim, shape.rank)
    value_up = random_weight(heads * shape.value_dim, shape.rank)
    rank, query_size = shape.query_rank, heads * shape.query_dim
    return LatentWeights(
        norm(shape.rank),
        key_up.view(heads, -1, shape.rank),
        value_up.view(heads, -1, shape.rank).transpose(1, 2).contiguous(),
        norm(rank) if rank else None,
        projection(query_size, rank) if rank else None,
    )


def random_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    blocks: str | None = None,
    quantize: Quantize | None = None,
    ranks: Ranks | None = None,
) -> DecoderWeights:
    """Normal weights with outputs of order 1; norms have weight 1, biases and sinks are 0.

    Experts of a model in MXFP4 are in that format: on a GPU in the checkpoint's bytes, on a CPU in
    blocks. With ``blocks``, all matrices are quantized in that GGUF format, and activations are
    ``dtype``. With ``quantize``, matrices of layers are narrowed to these codes. With ``ranks``,
    ``model`` is that of one rank, which has its share of the vocabulary."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, law = model.hidden_size, model.experts
    features = fused_features(model)

    def random_weight(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, columns**-0.5, generator=generator)

    drawn: dict[tuple[int, int], BlockMatrix] = {}

    def random_quantized(rows: int, columns: int) -> QuantizedWeight:
        assert blocks is not None
        # bits are drawn on the CPU, so layers have the same ones
        if (rows, columns) not in drawn:
            drawn[rows, columns] = normal_blocks(blocks, rows, columns)
        matrix = drawn[rows, columns]
        if device.type == "cuda":
            return QuantizedWeight.in_planes([matrix], dtype, device)
        return QuantizedWeight.create([matrix], dtype)

    def norm(size: int = hidden) -> Norm:
        ones = torch.ones(size, dtype=dtype, device=device)
        return Norm(ones, native=has_native_norm(dtype, device))

    def projection(rows: int, columns: int, packs: bool = True) -> Projection:
        if blocks is not None:
            return Projection(random_quantized(rows, columns))
        if quantize is not None:
            narrowed = quantize_matrix(random_weight(rows, columns), quantize)
            return Projection(QuantizedWeight([narrowed.laid_out()], dtype))
        plain = Projection(random_weight(rows, columns))
        return pack(plain) if packs else plain

    def mlp(layer: int) -> dict[str, Any]:
        if law is None or not model.has_experts(layer):
            inner = model.intermediate_size
            return {"gate_up": projection(2 * inner, hidden), "down": projection(hidden, inner)}
        count, inner = law.num_stored, law.intermediate_size
        router = random_weight(law.num_experts, hidden)
        sizes = (count * 2 * inner, hidden), (count * hidden, inner)
        if model.quantization is not None and model.quantization.method == "mxfp4":
            matrices = [_mxfp4(*size, dtype, generator) for size in sizes]
        else:
            matrices = [projection(*size, packs=False) for size in sizes]
        return {
            "gate_up": matrices[0],
            "down": matrices[1],
            "router": Router(padded_router(router) if router.is_cuda else router.float()),
        }

    head_norm = norm(model.head_dim) if model.qk_norm else None
    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=projection(features, hidden),
            output=projection(hidden, model.output_dim(layer)),
            mlp_norm=norm(),
            **mlp(layer),
            q_norm=head_norm,
            k_norm=head_norm,
            latent=random_latent(model, random_weight, norm, projection),
        )
        for layer in range(model.num_layers)
    )
    layers = tuple(_with_biases(layer, model, device) for layer in layers)
    vocabulary = model.vocab_size
    if ranks is not None:
        own = ranks.shard.vocabulary(vocabulary)
        vocabulary = own.stop - own.start
    if blocks is not None:
        quantized = random_quantized(vocabulary, hidden)
        return DecoderWeights(quantized, layers, norm(), Projection(quantized), ranks)
    head = pack(Projection(random_weight(vocabulary, hidden)))
    return DecoderWeights(random_weight(vocabulary, hidden), layers, norm(), head, ranks)
