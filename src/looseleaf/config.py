"""Every knob of the library, as frozen dataclasses that are checked when they are made.

One home for each default. Nothing here imports torch, so that reading a configuration is cheap.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from looseleaf.errors import InvalidOption

RopeLaw = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
DType = Literal["auto", "float32", "float16", "bfloat16"]

CpuKernels = Literal["auto", "native", "torch"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidOption(message)


def _option(default: Any, help_text: str) -> Any:
    """A field with its default and the help text that command lines show."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class RopeConfig:
    """Which angle a position turns each pair of dims by. Field names follow Hugging Face's
    ``rope_scaling``.

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
        _require(0 < self.rotary_dim <= self.head_dim, "rotary_dim must be in 1..head_dim")
        _require(self.rotary_dim % 2 == 0, "rotary_dim must be even: RoPE turns pairs of dims")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, whatever file it was read from.

    ``windows`` gives each layer's sliding window in tokens, 0 for full attention. ``norm`` is
    ``rms`` or ``layer``; ``parallel_residual`` adds attention and MLP to the same input (Phi)."""

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
            f"{self.num_qo_heads} query heads can't evenly share {self.num_kv_heads} KV heads",
        )

    def window(self, layer: int) -> int:
        """The sliding window of ``layer`` in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0


@dataclass(frozen=True)
class CacheConfig:
    """The device pool. ``num_pages`` wins over ``memory_gib``; with neither, the runner sizes
    it.
    """

    page_size: int = _option(16, "tokens per page: 16, 32 or 64")
    num_pages: int | None = _option(None, "pages in the pool; default: as memory_gib says")
    memory_gib: float | None = _option(
        None, "memory of the pool in GiB; default: what the device can spare"
    )
    prefix_caching: bool = _option(True, "keep full pages of text for requests that begin the same")

    def __post_init__(self) -> None:
        _require(
            self.page_size in (16, 32, 64), f"page_size must be 16, 32 or 64, not {self.page_size}"
        )
        _require(self.num_pages is None or self.num_pages > 0, "num_pages must be positive")
        _require(self.memory_gib is None or self.memory_gib > 0, "memory_gib must be positive")


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step."""

    max_num_seqs: int = _option(64, "sequences that run at once")
    max_num_batched_tokens: int | None = _option(
        None, "tokens that one step computes at most; default: 2048 on a CPU, 8192 on a GPU"
    )
    grouping: bool = _option(
        True, "rows that read the same pages share one work item, whatever their offsets"
    )
    batch_invariant: bool = _option(
        False, "attention splits and merges the same way whatever else is in the batch; slower"
    )

    def __post_init__(self) -> None:
        _require(self.max_num_seqs > 0, "max_num_seqs must be positive")
        _require(
            self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
            f"{self.max_num_seqs}, or running sequences leave no room for new ones",
        )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is made from besides the model."""

    device: str = _option("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    dtype: DType = _option(
        "auto",
        "float32, float16 or bfloat16; auto: the checkpoint's, or float32 where that is faster",
    )
    max_model_len: int | None = _option(
        None, "tokens of prompt and answer together; default: the model's limit"
    )
    cpu_kernels: CpuKernels = _option(
        "auto",
        "what decodes on a CPU: native (C, compiled once on this machine), torch, or auto: native "
        "where there is a C compiler",
    )
    salt: str = _option("", "caches with different salts share nothing")
    cuda_graphs: bool = _option(
        True, "on a GPU, replay steps of few rows instead of launching every kernel"
    )
    seed: int = _option(0, "where the random draws of requests without a seed start")
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _require(
            self.max_model_len is None or self.max_model_len > 0, "max_model_len must be positive"
        )
        _require(
            self.dtype in ("auto", "float32", "float16", "bfloat16"),
            f"unknown dtype {self.dtype!r}: use auto, float32, float16 or bfloat16",
        )
        _require(
            self.cpu_kernels in ("auto", "native", "torch"),
            f"unknown cpu_kernels {self.cpu_kernels!r}: use auto, native or torch",
        )

    def batched_tokens(self, on_gpu: bool) -> int:
        """What a step computes at most: as asked for, or what the device is fast with."""
        asked = self.scheduler.max_num_batched_tokens
        return asked or max(8192 if on_gpu else 2048, self.scheduler.max_num_seqs)


FuseSelector = Literal["none", "all", "first", "random", "deviation", "question", "links"]
"""Which tokens are computed again: none, all, the first of every document, a random control, those
whose keys and values deviate, those that the question reads, or these and the chains behind
them."""

_DEFAULT_RATIO = 0.15
_DEFAULT_FIRST = 16


@dataclass(frozen=True)
class Fuse:
    """Which tokens of its reused documents a request computes again, now that they meet.

    A document encoded by itself knows nothing of those before it. ``selector`` chooses tokens of
    all documents but one that stands directly behind what it was encoded behind; they are computed
    in their place and seen by this request only. How many: ``ratio``, a share of the tokens to
    choose from (default 0.15); or ``tokens``, a number, for ``first`` of each document (default
    16); or, for ``question`` and ``deviation``, ``threshold``, the score above which a token is
    chosen. ``none`` and ``all`` take none of these. ``watched_share`` of the layers, the last ones,
    tell what the question reads; ``check_layers``, from 1, rising, are where deviation is measured,
    each leaving fewer tokens to the next. Raises InvalidOption.
    """

    selector: FuseSelector = "none"
    ratio: float | None = None
    tokens: int | None = None
    threshold: float | None = None
    watched_share: float = 0.25
    check_layers: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        known = get_args(FuseSelector)
        _require(
            self.selector in known, f"unknown selector {self.selector!r}: use {', '.join(known)}"
        )
        given = [
            name for name in ("ratio", "tokens", "threshold") if getattr(self, name) is not None
        ]
        takes = {
            "none": (),
            "all": (),
            "first": ("tokens",),
            "random": ("ratio", "tokens"),
            "links": ("ratio", "tokens"),
            "deviation": ("ratio", "tokens", "threshold"),
            "question": ("ratio", "tokens", "threshold"),
        }[self.selector]
        wrong = [name for name in given if name not in takes]
        _require(
            not wrong,
            f"selector {self.selector!r} takes {' or '.join(takes) or 'no budget'}, not {wrong}",
        )
        _require(len(given) < 2, f"give one of {' and '.join(given)}")
        _require(self.ratio is None or 0 <= self.ratio <= 1, "ratio must be from 0 to 1")
        _require(self.tokens is None or self.tokens >= 0, "tokens must be 0 or more")
        _require(0 < self.watched_share <= 1, "watched_share must be above 0 and at most 1")
        layers = self.check_layers
        _require(
            len(layers) > 0 and list(layers) == sorted(set(layers)) and layers[0] >= 1,
            f"check_layers rise and begin at 1 or later, not {layers}",
        )
        if not given and "ratio" in takes:
            object.__setattr__(self, "ratio", _DEFAULT_RATIO)
        elif not given and self.selector == "first":
            object.__setattr__(self, "tokens", _DEFAULT_FIRST)

    def __str__(self) -> str:
        names = ("ratio", "tokens", "threshold")
        given = [f"{n} {getattr(self, n):g}" for n in names if getattr(self, n) is not None]
        return ", ".join([self.selector, *given])


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server is reached, whom it answers, and how much each may ask of it."""

    host: str = _option("127.0.0.1", "address to listen at")
    port: int = _option(8000, "port to listen at; 0 takes a free one")
    served_model_name: str | None = _option(
        None, "name of the model for clients; default: as the checkpoint is named"
    )
    system_prompt: tuple[str, ...] = _option(
        (),
        "[NAME=]FILE: text that is read before every chat, computed once; with NAME, for a model "
        "of that name beside the plain one; may be repeated",
    )
    document_template: str | None = _option(
        None,
        "a document's text from {title} and {text}; a line with {title} is left out where there is "
        "no title; default: '{text}', after a line with the title if the model has no form for "
        "documents",
    )
    api_keys: str | None = _option(
        None,
        "file of lines TENANT=KEY; tenants share nothing; LOOSELEAF_KEYS may hold them as well",
    )
    open_loopback: bool = _option(
        True, "where there are no keys, answer everybody on this machine, and nobody else"
    )
    open_metrics: bool = _option(False, "give /metrics to callers without a key")
    operator: str = _option("operator", "the tenant whose keys may read /metrics")
    requests_per_minute: int | None = _option(None, "most requests of one key in a minute")
    concurrent_requests: int | None = _option(None, "most requests of one key at a time")
    max_body_mib: float = _option(32.0, "largest request body in MiB")
    max_documents: int = _option(256, "most documents of one request")
    max_request_tokens: int | None = _option(
        None, "most tokens of prompt and answer of one request; default: the model's context"
    )
    max_completions: int = _option(64, "most outputs of one request: n times its prompts")
    max_queue: int = _option(256, "outputs that may wait for a free place; more are refused")
    max_registered: int = _option(10_000, "most registered documents of one tenant")
    deadline: float = _option(600.0, "seconds that a request may take, at most")
    drain_seconds: float = _option(600.0, "seconds that running requests get when the server ends")
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "least level to log")
    log_format: Literal["json", "console"] = _option("json", "form of the log, one line an event")
    tracing: bool = _option(False, "send OpenTelemetry traces, as the OTEL_ variables say")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port must be from 0 to 65535, not {self.port}")
        for name in (
            "requests_per_minute",
            "concurrent_requests",
            "max_body_mib",
            "max_documents",
            "max_request_tokens",
            "max_completions",
            "max_queue",
            "max_registered",
            "deadline",
            "drain_seconds",
        ):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive, not {value}")
        template = self.document_template
        _require(
            template is None or template.count("{text}") == 1,
            "document_template must say once where the {text} stands",
        )
