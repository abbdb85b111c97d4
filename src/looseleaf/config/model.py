"""What a model is: its shape and its RoPE law, whatever file they were read from."""

from dataclasses import dataclass, replace
from typing import Literal

from looseleaf.config.option import require, require_each

RopeLaw = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Which angle a position turns each pair of dims by. Field names follow Hugging Face's
    ``rope_scaling``; under the law ``none`` nothing turns (NoPE).

    ``length`` is the sequence length that length-dependent laws (``dynamic``, ``longrope``) are
    frozen at; it is part of the identity of every key stored under this configuration."""

    head_dim: int
    rotary_dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    law: RopeLaw = "default"
    factor: float = 1.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    length: int | None = None

    def __post_init__(self) -> None:
        most = self.head_dim
        require_each(self, f"from 1 to head_dim={most}", lambda d: 0 < d <= most, "rotary_dim")
        rule = "even, since RoPE turns pairs of dims"
        require_each(self, rule, lambda dim: dim % 2 == 0, "rotary_dim")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, whatever file it was read from.

    ``windows`` gives each layer's sliding window in tokens, 0 for full attention; ``layer_ropes``
    each layer's RoPE law where layers differ, else all have ``rope``. ``norm`` is
    ``rms`` or ``layer``; ``parallel_residual`` adds attention and MLP to the same input (Phi).

    ``qk_norm`` norms each head of queries and keys, and all heads as one with ``joint_qk_norm``.
    ``post_norms`` norm what attention and MLP add to the stream, before it is added (Gemma, GLM-4);
    without ``pre_norms`` they read the stream as it is (OLMo 2).
    ``norm_offset`` is what norms weigh besides their stored weights. ``embedding_multiplier`` is
    rounded to the model's dtype. ``softmax_scale`` is None for one over the root of ``head_dim``.
    ``soft_cap`` caps attention scores, ``final_soft_cap`` logits; 0 caps nothing. Logits are
    divided by ``logits_scaling`` first."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    max_position_embeddings: int
    norm_eps: float = 1e-6
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "gelu_new", "gelu"] = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    parallel_residual: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    tie_word_embeddings: bool = False
    windows: tuple[int, ...] = ()
    layer_ropes: tuple[RopeConfig, ...] = ()
    softmax_scale: float | None = None
    soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    torch_dtype: str = "float32"

    def __post_init__(self) -> None:
        require(
            self.num_qo_heads % self.num_kv_heads == 0,
            f"{self.num_qo_heads} query heads can't evenly share {self.num_kv_heads} KV heads",
        )

        require(
            len(self.layer_ropes) in (0, self.num_layers),
            f"layer_ropes has {len(self.layer_ropes)} laws for {self.num_layers} layers",
        )
        forms = {(r.head_dim, r.rotary_dim, r.interleaved) for r in self.layer_ropes}
        require(len(forms) < 2, "every layer must turn the same pairs of dims, or by angles of 0")

    def rope_of(self, layer: int) -> RopeConfig:
        """The RoPE law of ``layer``."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The laws that layers have, each once, in the order of the first layers that have them."""
        return tuple(dict.fromkeys(self.layer_ropes or (self.rope,)))

    def frozen_at(self, length: int) -> "ModelConfig":
        """The same model with every law frozen at a sequence length."""
        rope, *others = (replace(r, length=length) for r in (self.rope, *self.layer_ropes))
        return replace(self, rope=rope, layer_ropes=tuple(others))

    def window(self, layer: int) -> int:
        """The sliding window of ``layer`` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0
