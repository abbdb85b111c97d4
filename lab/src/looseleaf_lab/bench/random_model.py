"""Engines over random weights of real shapes, created on the device without a checkpoint file.

For speed only: the answers of a random model are meaningless."""

import torch
from torch import Tensor

from looseleaf.config import EngineConfig, ModelConfig, Quantize, RopeConfig
from looseleaf.engine.engine import Engine
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import LoadedModel, make_engine, reference_model
from looseleaf.models import Decoder, Tokenizer
from looseleaf.models.layers import DecoderWeights, LayerWeights, Norm
from looseleaf.models.linear import Projection, pack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.rms_norm.native import has_native_norm
from looseleaf.ops.dense.scaled_linear import quantize as quantize_matrix
from looseleaf.parallel import Ranks
from looseleaf_lab.testing.quantized import normal_blocks

MODEL_SHAPES = {
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(
            head_dim=128,
            rotary_dim=128,
            theta=500_000.0,
            law="llama3",
            factor=8.0,
            max_position_embeddings=131_072,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131_072,
        norm_eps=1e-5,
        torch_dtype="bfloat16",
    ),
    "llama-3.1-70b": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_qo_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(
            head_dim=128,
            rotary_dim=128,
            theta=500_000.0,
            law="llama3",
            factor=8.0,
            max_position_embeddings=131_072,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131_072,
        norm_eps=1e-5,
        torch_dtype="bfloat16",
    ),
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_qo_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope=RopeConfig(head_dim=64, rotary_dim=64, theta=100_000.0),
        max_position_embeddings=8192,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    ),
    # the reference model's shape, with a longer context
    "small": ModelConfig(
        family="llama",
        vocab_size=2048,
        hidden_size=384,
        intermediate_size=208,
        num_layers=8,
        num_qo_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rope=RopeConfig(head_dim=64, rotary_dim=64),
        max_position_embeddings=32_768,
    ),
    "tiny": ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(head_dim=16, rotary_dim=16),
        max_position_embeddings=4096,
    ),
}


def model_shape(name: str) -> ModelConfig:
    """The shape of that name. Raises InvalidOption for an unknown name."""
    if name not in MODEL_SHAPES:
        raise InvalidOption(f"unknown shape {name!r}: use one of {', '.join(MODEL_SHAPES)}")
    return MODEL_SHAPES[name]


def random_decoder(shape: str, device: torch.device) -> Decoder:
    """A model with random weights in the shape's dtype; several engines may share it.

    Raises InvalidOption for a shape that is not in `MODEL_SHAPES`.
    """
    model = model_shape(shape)
    return Decoder(model, random_weights(model, getattr(torch, model.torch_dtype), device))


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
    shape: str, codes: Quantize | None, config: EngineConfig, ranks: Ranks | None = None
) -> Engine:
    """An engine over random weights, one of ``ranks`` or the only one.

    ``codes`` quantizes the matrices of layers on a GPU. Prompts must be token ids."""
    model, folder, device = model_shape(shape), reference_model(), torch.device(config.device)
    length = config.max_model_len or model.max_position_embeddings
    whole = model.frozen_at(length)
    local = whole if ranks is None else ranks.shard.local(whole)
    weights = random_weights(
        local, getattr(torch, model.torch_dtype), device, codes=codes, ranks=ranks
    )
    tokenizer, name = Tokenizer(folder), f"random {shape}".encode()
    loaded = LoadedModel(folder, local, Decoder(local, weights), tokenizer, name, length)
    return make_engine(loaded, config)


def random_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    blocks: str | None = None,
    *,
    codes: Quantize | None = None,
    ranks: Ranks | None = None,
) -> DecoderWeights:
    """Normal weights with outputs of order 1; norms have weight 1. No biases.

    With ``blocks``, all matrices are quantized in that GGUF format, activations are ``dtype``.
    ``codes`` quantizes the matrices of layers on a GPU. With ``ranks``, ``model`` is one rank's,
    which gets its share of the vocabulary."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_qo_heads * model.head_dim, model.num_kv_heads * model.head_dim

    def random_weight(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, columns**-0.5, generator=generator)

    def random_quantized(rows: int, columns: int) -> QuantizedWeight:
        assert blocks is not None
        return QuantizedWeight.create([normal_blocks(blocks, rows, columns)], dtype)

    def random_codes(rows: int, columns: int) -> QuantizedWeight:
        assert codes is not None
        return QuantizedWeight(
            [quantize_matrix(random_weight(rows, columns), codes).laid_out()], dtype
        )

    def norm() -> Norm:
        ones = torch.ones(hidden, dtype=dtype, device=device)
        return Norm(ones, native=has_native_norm(dtype, device))

    def projection(rows: int, columns: int) -> Projection:
        if blocks is not None:
            return Projection(random_quantized(rows, columns))
        if codes is not None:
            return Projection(random_codes(rows, columns))
        return pack(Projection(random_weight(rows, columns)))

    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=projection(q_size + 2 * kv_size, hidden),
            output=projection(hidden, q_size),
            mlp_norm=norm(),
            gate_up=projection(2 * inner, hidden),
            down=projection(hidden, inner),
        )
        for _ in range(model.num_layers)
    )
    vocabulary = model.vocab_size
    if ranks is not None:
        own = ranks.shard.vocabulary(vocabulary)
        vocabulary = own.stop - own.start
    if blocks is not None:
        head = projection(vocabulary, hidden)
        assert isinstance(head.weight, QuantizedWeight)
        return DecoderWeights(head.weight, layers, norm(), head, ranks)
    head = pack(Projection(random_weight(vocabulary, hidden)))
    return DecoderWeights(random_weight(vocabulary, hidden), layers, norm(), head, ranks)
