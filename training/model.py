"""A plain Llama in torch for training, with the parameter names of Hugging Face checkpoints.

Not the engine's model: no cache, no decoding. Rows hold several samples packed end to end, so every
forward takes a mask: a flex-attention `BlockMask` on a GPU, a dense boolean tensor elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

LEAD, TEXT = 0, 127  # parts of a sample; 1..126 are its documents


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the decoder."""

    vocab_size: int = 2_048
    hidden_size: int = 384
    intermediate_size: int = 208
    num_layers: int = 8
    num_qo_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 4_096

    def describe(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True)
class Rope:
    """Rotations of every place of a row."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: ModelConfig) -> Rope:
        """Half-split rotations, fp32, [..., head_dim]."""
        exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
        angles = positions.float()[..., None] * (config.rope_theta**-exponents)
        angles = torch.cat((angles, angles), -1)
        return cls(angles.cos(), angles.sin())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over packed rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        qo, kv = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, qo, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(qo, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, mask: BlockMask | Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.config.head_dim)
        query = _rotate(self.q_proj(x).view(heads).transpose(1, 2), rope.cos, rope.sin)
        key = _rotate(self.k_proj(x).view(heads).transpose(1, 2), rope.cos, rope.sin)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if not isinstance(mask, Tensor):
            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
        assert isinstance(out, Tensor)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer, compiled by itself so that all layers share one compilation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rope: Rope, mask: BlockMask | Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Embedding, layers and norm; the output head is the embedding. Returns the last states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / (2 * config.num_layers) ** 0.5 if into_residual else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, rope: Rope, mask: BlockMask | Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # half the memory traffic
        for layer in self.layers:
            x = layer(x, rope, mask)
        out: Tensor = self.norm(x)
        return out

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def visible(sample: Tensor, part: Tensor) -> Callable[..., Tensor]:
    """Which key a query may read: its own sample's past, and of documents only what it should.

    A sample whose tokens are all `TEXT` is causal. Otherwise a document reads the lead and itself,
    the text behind the documents reads everything before it.
    """

    def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        past = (sample[row, query] == sample[row, key]) & (key <= query)
        own = (part[row, key] == part[row, query]) | (part[row, key] == LEAD)
        return past & (own | (part[row, query] == TEXT))

    return rule


def dense_mask(sample: Tensor, part: Tensor) -> Tensor:
    """The rule as a boolean tensor [row, 1, query, key]."""
    rows, length = sample.shape
    place = torch.arange(length, device=sample.device)
    row = torch.arange(rows, device=sample.device)[:, None, None, None]
    return visible(sample, part)(row, row, place[:, None], place)


_BLOCK = 128  # places to a side of a mask's block


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of a boolean table [row, 1, block, block]: how many of each line, and which, in order.

    Contiguous, as the kernels want them.
    """
    number = blocks.sum(-1, dtype=torch.int32).contiguous()
    which = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return number, which.int().contiguous()


def block_mask(sample: Tensor, part: Tensor, rule: Callable[..., Tensor]) -> BlockMask:
    """The mask of `rule` from what its blocks hold: next to no work for rows of any length.

    Samples of a row must be numbered upwards, padding behind them 0. A block may be called partly
    seen though nothing of it is: documents on their own make such blocks.
    """
    rows, length = sample.shape
    number = torch.where(sample == 0, torch.iinfo(sample.dtype).max, sample)
    runs = number.view(rows, length // _BLOCK, _BLOCK)
    first, last = runs[..., 0], runs[..., -1]
    causal = (part == TEXT).view(runs.shape).all(-1)
    one = (first == last) & causal
    place = torch.arange(first.shape[1], device=sample.device)
    past = place[:, None] >= place
    seen = past & (last[:, None, :] >= first[:, :, None])
    whole = (place[:, None] > place) & one[:, :, None] & one[:, None, :]
    whole &= first[:, None, :] == first[:, :, None]
    partly, whole = (seen & ~whole)[:, None], whole[:, None]
    of_query, of_key = (
        (_ordered(partly), _ordered(whole)),
        (_ordered(partly.mT), _ordered(whole.mT)),
    )
    return BlockMask(
        (length, length), *of_query[0], *of_query[1], *of_key[0], *of_key[1],
        BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=rule,
    )  # fmt: skip


class FlexMasks:
    """Block masks over buffers that stay the same objects, so that nothing is compiled twice."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        if length % _BLOCK:
            raise ValueError(f"rows on a GPU are of a multiple of {_BLOCK} places, not {length}")
        self._sample = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self._part = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self._rule = visible(self._sample, self._part)

    def __call__(self, sample: Tensor, part: Tensor) -> BlockMask:
        self._sample.copy_(sample)
        self._part.copy_(part)
        return block_mask(self._sample, self._part, self._rule)
