"""Tensors of latent attention (MLA): names and sizes of the fused projection, and the maps."""

from torch import Tensor

from looseleaf.config import LatentConfig, ModelConfig
from looseleaf.models.checkpoint.tensor_reader import TensorReader
from looseleaf.models.layers import LatentWeights


def fused_tensors(config: ModelConfig) -> tuple[list[str], list[int]]:
    """Names and features of the projections of a layer's normed input: queries or their latent, and
    the latent of keys and values with the rotated dims."""
    shape = config.latent
    assert shape is not None, "only for latent attention"
    name = "q_a_proj" if shape.query_rank else "q_proj"
    features = shape.query_rank or config.num_qo_heads * shape.query_dim
    return [name, "kv_a_proj_with_mqa"], [features, shape.key_dim]


def read_latent(reader: TensorReader, config: ModelConfig, prefix: str) -> LatentWeights:
    """The maps of the attention ``prefix``; those of keys and values are dequantized."""
    shape, heads = config.latent, config.num_qo_heads
    assert shape is not None, "only for latent attention"
    key_up, value_up = _maps(reader, shape, heads, prefix)
    query_norm = query_up = None
    if rank := shape.query_rank:
        query_norm = reader.norm(prefix + "q_a_layernorm", rank, config)
        sizes = [heads * shape.query_dim]
        query_up = reader.projection([prefix + "q_b_proj"], sizes, rank, bias=False)
    return LatentWeights(
        reader.norm(prefix + "kv_a_layernorm", shape.rank, config),
        key_up.contiguous(),
        value_up.transpose(1, 2).contiguous(),
        query_norm,
        query_up,
    )


def _maps(
    reader: TensorReader, shape: LatentConfig, heads: int, prefix: str
) -> tuple[Tensor, Tensor]:
    """The maps of latents to keys ``[heads, nope_dim, rank]`` and to values ``[heads, value_dim,
    rank]``: one matrix, or in GGUF files two tensors, of which the keys' is transposed."""
    rank, expanded = shape.rank, shape.nope_dim + shape.value_dim
    joint, names = prefix + "kv_b_proj.weight", [prefix + f"{n}_b_proj.weight" for n in "kv"]
    if joint in reader or names[0] not in reader:
        both = reader.fused([joint], [(heads * expanded, rank)]).view(heads, expanded, rank)
        key_up, value_up = both.split((shape.nope_dim, shape.value_dim), 1)
        return key_up, value_up
    keys = reader.fused(names[:1], [(heads, rank, shape.nope_dim)])
    return keys.transpose(1, 2), reader.fused(names[1:], [(heads, shape.value_dim, rank)])
