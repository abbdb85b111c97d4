"""The architecture of a model and its RoPE laws, independent of checkpoint formats."""

from dataclasses import dataclass, replace
from typing import Literal

from looseleaf.config.experts import ExpertConfig
from looseleaf.config.option import require, require_each, require_positive

RopeLaw = Literal[
    "none", "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"
]


@dataclass(frozen=True)
class RopeConfig:
    """A RoPE law and its parameters, named as in Hugging Face's ``rope_scaling``.

    The law ``none`` rotates nothing (NoPE). ``length`` is the frozen sequence length of
    length-dependent laws (``dynamic``, ``longrope``); it is part of the identity of stored keys.
    The law ``proportional`` rotates the first ``partial_rotary_factor`` of the pairs.

    ``own_dim`` is the size of a layer's own heads if a stored head has several of them
    (`LayerHeads`): each has the same frequencies. 0 means ``rotary_dim``."""

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
    partial_rotary_factor: float = 1.0
    own_dim: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        most = self.head_dim
        require_each(self, f"from 1 to head_dim={most}", lambda d: 0 < d <= most, "rotary_dim")
        rule = "even, because RoPE rotates pairs of dims"
        require_each(self, rule, lambda dim: dim % 2 == 0, "rotary_dim", "own_dim")


@dataclass(frozen=True)
class LayerHeads:
    """The KV heads of a layer whose heads differ from the stored heads of the model.

    A stored head has the dims of one or several of the layer's heads (`looseleaf.models.packing`).
    With ``tied_values`` the projection of keys gives the values, too."""

    num_kv_heads: int
    head_dim: int
    tied_values: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """Further inputs of each layer: ``dim`` values of a token's own embedding for that layer and of
    a projection of its embedding (Gemma 3n, Gemma 4)."""

    dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        require_positive(self, "dim", "vocab_size")


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (MLA, arXiv 2405.04434 §2.1): one latent vector a token serves all heads.

    A query head and an expanded key have ``nope_dim`` dims without and ``rope_dim`` dims with RoPE.
    An expanded value has ``value_dim`` dims. Queries pass a latent of ``query_rank`` dims, 0 for
    none."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0

    @property
    def query_dim(self) -> int:
        """The dims of an expanded query head."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """The dims of expanded keys and values in memory: the rotated dims, then the others, padded
        to one size."""
        return self.rope_dim + max(self.nope_dim, self.value_dim)

    @property
    def key_dim(self) -> int:
        """The dims of a stored key: the rotated dims, then the latent."""
        return self.rope_dim + self.rank


@dataclass(frozen=True)
class Quantization:
    """The method of a checkpoint's quantized matrices, and the version of its layout."""

    method: Literal["fp8", "compressed-tensors", "awq", "gptq", "mxfp4"]
    version: str = ""


@dataclass(frozen=True)
class QueryScaling:
    """Factors of queries: ``1 + beta * log(1 + position // period)`` (Llama 4, Ministral 3).

    The position is the query's own, in its sequence; the frame that the query is rotated to does
    not matter. Keys have no factor."""

    beta: float
    period: int

    def __post_init__(self) -> None:
        require_each(self, "at least 1", lambda n: n >= 1, "period")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder.

    ``windows`` are the layers' sliding windows in tokens, 0 for full attention. ``layer_ropes`` are
    the layers' RoPE laws if they differ; otherwise all have ``rope``. ``parallel_residual`` adds
    attention and MLP to the same input (Phi).

    ``qk_norm`` normalises each head of queries and keys, with ``joint_qk_norm`` all heads jointly.
    ``post_norms`` normalise the outputs of attention and MLP (Gemma, GLM-4). Without ``pre_norms``
    their inputs are not normalised (OLMo 2). ``norm_offset`` is added to the stored weights of
    norms. ``embedding_multiplier`` is rounded to the model's dtype. ``softmax_scale`` None means
    ``head_dim ** -0.5``. ``soft_cap`` caps attention scores, ``final_soft_cap`` logits after their
    division by ``logits_scaling``; 0 means no cap. ``sinks`` means that each layer has a learned
    logit per query head of a key whose value is 0. ``query_scaling`` is None if all queries have
    the factor 1. Layers with ``experts`` have no other MLP; dense ones have ``intermediate_size``.

    The activation ``swigluoai`` (GPT-OSS) is ``gate * sigmoid(swiglu_alpha * gate) * (up + 1)``,
    with ``gate`` at most ``swiglu_limit`` and ``up`` between it and its negative.
    ``quantization`` is None if all tensors are plain.

    A model with ``latent`` attention has one KV head. Its ``head_dim`` is that of a stored key,
    whose first dims rotate. Queries are mapped to the space of stored keys. The stored keys are
    also the values, and the output of attention is expanded after their ``rope_dim`` dims.

    ``num_kv_heads`` and ``head_dim`` are those of stored heads. ``layer_heads`` are the layers' own
    heads if they differ. ``value_norm`` divides each value by its root mean square. The last
    ``num_kv_shared`` layers store nothing: each reads the keys and values of the last earlier layer
    with the same window that stores them. ``layer_intermediate_sizes`` are those of dense MLPs if
    they differ. ``layer_scalars`` multiply the stream after each layer."""

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
    activation: Literal["silu", "gelu_new", "gelu", "swigluoai"] = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
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
    sinks: bool = False
    query_scaling: QueryScaling | None = None
    torch_dtype: str = "float32"
    quantization: Quantization | None = None
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    layer_heads: tuple[LayerHeads, ...] = ()
    value_norm: bool = False
    num_kv_shared: int = 0
    layer_intermediate_sizes: tuple[int, ...] = ()
    layer_inputs: LayerInputs | None = None
    layer_scalars: bool = False

    def __post_init__(self) -> None:
        require(
            self.num_qo_heads % self.num_kv_heads == 0,
            f"{self.num_qo_heads} query heads can't evenly share {self.num_kv_heads} KV heads",
        )

        if self.latent is not None:
            require(
                (self.num_kv_heads, self.head_dim) == (1, self.latent.key_dim),
                f"latent attention has one KV head of {self.latent.key_dim} dims",
            )
        require(
            len(self.layer_ropes) in (0, self.num_layers),
            f"layer_ropes has {len(self.layer_ropes)} laws for {self.num_layers} layers",
        )
        forms = {(r.head_dim, r.rotary_dim, r.interleaved) for r in self.layer_ropes}
        require(len(forms) < 2, "every layer must rotate the same pairs of dims, or by angles of 0")
        require(
            0 <= self.num_kv_shared < self.num_layers,
            f"{self.num_kv_shared} of {self.num_layers} layers can't share the KV of others",
        )

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of ``layer`` is a mixture of experts, without a dense one."""
        law = self.experts
        return law is not None and not law.beside_mlp and layer not in law.dense_layers

    def rope_of(self, layer: int) -> RopeConfig:
        """The RoPE law of ``layer``."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def heads_of(self, layer: int) -> LayerHeads:
        """The own KV heads of ``layer``."""
        if self.layer_heads:
            return self.layer_heads[layer]
        return LayerHeads(self.num_kv_heads, self.head_dim)

    def inner_size(self, layer: int) -> int:
        """The intermediate size of the dense MLP of ``layer``."""
        sizes = self.layer_intermediate_sizes
        return sizes[layer] if sizes else self.intermediate_size

    @property
    def num_stored_layers(self) -> int:
        """The layers that store keys and values: the first ones."""
        return self.num_layers - self.num_kv_shared

    def kv_layer(self, layer: int) -> int:
        """The layer that stores the keys and values that ``layer`` reads."""
        if layer < self.num_stored_layers:
            return layer
        earlier = reversed(range(self.num_stored_layers))
        return next(n for n in earlier if self.window(n) == self.window(layer))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct laws of the layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layer_ropes or (self.rope,)))

    @property
    def kv_planes(self) -> int:
        """Vectors that a KV head stores of a token: key and value, or a key that is both."""
        return 1 if self.latent is not None else 2

    def output_dim(self, layer: int) -> int:
        """The dims of all heads' outputs, the input of the output projection of ``layer``."""
        if self.latent is not None:
            return self.num_qo_heads * self.latent.value_dim
        return self.num_qo_heads * self.heads_of(layer).head_dim

    def frozen_at(self, length: int) -> "ModelConfig":
        """This model with every law frozen at a sequence length."""
        rope, *layer_ropes = (replace(r, length=length) for r in (self.rope, *self.layer_ropes))
        return replace(self, rope=rope, layer_ropes=tuple(layer_ropes))

    def window(self, layer: int) -> int:
        """The sliding window of ``layer`` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0
