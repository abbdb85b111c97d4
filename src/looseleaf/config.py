"""Every knob of the library, as frozen dataclasses that are checked when they are made.

One home for each default. Nothing here imports torch, so that reading a configuration is cheap.
"""

from dataclasses import dataclass
from typing import Literal

from looseleaf.errors import InvalidOption

RopeLaw = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
DType = Literal["auto", "float32", "float16", "bfloat16"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidOption(message)


@dataclass(frozen=True)
class RopeConfig:
    """Which angle a position turns each pair of dims by. Field names follow Hugging Face's ``rope_scaling``.

    ``length`` is the sequence length that length-dependent laws (``dynamic``, ``longrope``) are frozen at;
    it is part of the identity of every key stored under this configuration.
    """

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
        _require(0 < self.rotary_dim <= self.head_dim, "rotary_dim must be in 1..head_dim")
        _require(self.rotary_dim % 2 == 0, "rotary_dim must be even: RoPE turns pairs of dims")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, whatever file it was read from.

    ``windows`` gives each layer's sliding window in tokens, 0 for full attention. ``norm`` is ``rms`` or
    ``layer``; ``parallel_residual`` adds attention and MLP to the same input (Phi).
    """

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
    parallel_residual: bool = False
    tie_word_embeddings: bool = False
    windows: tuple[int, ...] = ()
    soft_cap: float = 0.0
    torch_dtype: str = "float32"

    def __post_init__(self) -> None:
        _require(
            self.num_qo_heads % self.num_kv_heads == 0,
            f"{self.num_qo_heads} query heads can't be shared evenly by {self.num_kv_heads} KV heads",
        )

    def window(self, layer: int) -> int:
        """The sliding window of ``layer`` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True)
class CacheConfig:
    """The device pool. ``num_pages`` wins over ``memory_gib``; with neither, the runner sizes it.

    ``page_size`` is in tokens. ``prefix_caching`` publishes sealed text pages for reuse; documents are
    always kept.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_gib: float | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(self.page_size in (16, 32, 64), f"page_size must be 16, 32 or 64, not {self.page_size}")
        _require(self.num_pages is None or self.num_pages > 0, "num_pages must be positive")
        _require(self.memory_gib is None or self.memory_gib > 0, "memory_gib must be positive")


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step: at most ``max_num_seqs`` rows decode, ``max_num_batched_tokens`` run.

    ``grouping`` lets rows that read the same pages share one work item, whatever their offsets; the
    output is the same without it.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    grouping: bool = True

    def __post_init__(self) -> None:
        _require(self.max_num_seqs > 0, "max_num_seqs must be positive")
        _require(self.max_num_batched_tokens > 0, "max_num_batched_tokens must be positive")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is made from besides the model.

    ``max_model_len`` None takes the model's own limit. ``device`` and ``dtype`` ``auto`` pick a GPU if there
    is one and the checkpoint's dtype (fp32 on CPUs without fast bf16). ``salt`` separates caches that must not
    know of each other.
    """

    device: str = "auto"
    dtype: DType = "auto"
    max_model_len: int | None = None
    salt: str = ""
    seed: int = 0
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    def __post_init__(self) -> None:
        _require(self.max_model_len is None or self.max_model_len > 0, "max_model_len must be positive")
        _require(
            self.dtype in ("auto", "float32", "float16", "bfloat16"), f"unknown dtype {self.dtype!r}"
        )
