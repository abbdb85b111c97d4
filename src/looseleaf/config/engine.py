"""The configuration of an engine, apart from its model: device, pool and scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_each,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
)
from looseleaf.config.tiers import TierConfig

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantize = Literal["fp8", "int8", "int4"]
CpuKernels = Literal["auto", "native", "torch"]
KvDType = Literal["auto", "fp8"]
AllReduce = Literal["auto", "nccl"]
AttentionCosts = Literal["built-in", "measured"]


@dataclass(frozen=True)
class CacheConfig:
    """The device pool. ``num_pages`` overrides ``memory_gib``; without both, the runner sizes the
    pool.
    """

    page_size: int = option(16, "tokens per page: 16, 32 or 64")
    num_pages: int | None = option(None, "pages in the pool; default: computed from memory_gib")
    memory_gib: float | None = option(
        None, "memory of the pool in GiB; default: the free memory of the device"
    )
    kv_dtype: KvDType = option(
        "auto",
        "dtype of stored keys and values: auto (the model's dtype) or fp8 (e4m3: half the memory "
        "of 16 bits, three bits of precision)",
    )
    prefix_caching: bool = option(
        True, "keep full pages of text for requests with an equal beginning"
    )
    kv_events: str | None = option(
        None,
        "ZeroMQ endpoint for vLLM's KV events about prefixes, such as tcp://*:5557; default: none",
    )

    def __post_init__(self) -> None:
        require_kinds(self)
        require_each(self, "16, 32 or 64", lambda size: size in (16, 32, 64), "page_size")
        require_positive(self, "num_pages", "memory_gib")
        require(
            self.kv_events is None or self.prefix_caching,
            "kv_events are about the prefix cache: leave prefix_caching on, or kv_events out",
            *("kv_events", "prefix_caching"),
        )


@dataclass(frozen=True)
class SchedulerConfig:
    """The batching of requests into steps."""

    max_num_seqs: int | None = option(
        None, "most sequences that run concurrently; default: 64 on a CPU, 256 on a GPU"
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens of one step, exceeded by up to a sixty-fourth if that completes a prompt; "
        "default: 2048 on a CPU, 8192 on a GPU",
    )
    step_ms: float | None = option(
        None,
        "goal for the duration of a step (ms): prefill beside running outputs is cut to fit, by "
        "measured compute times; 0: only max_num_batched_tokens bounds a step; default: 100 on a "
        "GPU, 0 on a CPU",
    )
    grouping: bool = option(
        True, "share one work item between rows that read the same pages at any offsets"
    )
    batch_invariant: bool = option(
        False, "make the splits and merges of attention independent of the batch; slower"
    )

    def __post_init__(self) -> None:
        require_kinds(self)
        require_positive(self, "max_num_seqs", "max_num_batched_tokens")
        require_not_negative(self, "step_ms")
        require(
            self.max_num_batched_tokens is None
            or self.max_num_seqs is None
            or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
            f"{self.max_num_seqs}, or running sequences leave no room for new ones",
            "max_num_batched_tokens",
            "max_num_seqs",
        )


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine, apart from its model."""

    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto: a GPU if available")
    dtype: DType = option(
        "auto",
        "float32, float16 or bfloat16; auto: the checkpoint's, or float32 if that is faster",
    )
    quantize: Quantize | None = option(
        None,
        "on a GPU, narrow a 16-bit checkpoint's matrices while they load: fp8, int8, or int4 in "
        "groups of 128; default: as stored",
    )
    max_model_len: int | None = option(
        None, "most tokens of prompt and answer together; default: the model's limit"
    )
    tensor_parallel: int = option(
        1, "GPUs, or processes on a CPU, that share the model: heads, MLP and vocabulary are split"
    )
    all_reduce: AllReduce = option(
        "nccl",
        "sums over the GPUs of tensor_parallel: nccl, or auto: few rows by peer memory if the GPUs "
        "can read each other's",
    )
    cpu_kernels: CpuKernels = option(
        "auto",
        "decode kernels on a CPU: native (C, compiled once on this machine), torch, or auto: "
        "native if there is a C compiler",
    )
    threads: int | None = option(
        None,
        "compute threads of a CPU; default: OMP_NUM_THREADS, or the fastest number measured at "
        "the start",
    )
    salt: str = option("", "part of the identity of cached segments: different salts share nothing")
    cuda_graphs: bool = option(
        True, "on a GPU, replay steps of few rows as CUDA graphs instead of launching each kernel"
    )
    attention_costs: AttentionCosts = option(
        "built-in",
        "cost model of grouping and splitting on a GPU: built-in (costs of an H200), or measured "
        "(at the first start with a shape, then stored on disk)",
    )
    canary_share: float = option(
        0.0,
        "share of the requests with a fuse policy whose answers are compared with those of a full "
        "prefill, in the background",
    )
    canary_bound: float = option(
        0.95, "least share of equal canary answers; below it, ratios of fuse policies are raised"
    )
    policy: str | None = option(
        None,
        "policy file of looseleaf calibrate: the fuse policy of requests that name none; default: "
        "documents are reused as they are",
    )
    seed: int = option(0, "first seed of the requests without a seed")
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tiers: TierConfig = field(default_factory=TierConfig)

    def __post_init__(self) -> None:
        require_kinds(self)
        require_positive(self, "max_model_len", "threads", "tensor_parallel")
        require(
            self.tensor_parallel == 1 or not self.tiers.compute_once,
            "compute_once is not supported with tensor_parallel: leave one of them out",
            *("compute_once", "tensor_parallel"),
        )
        require_share(self, "canary_share", "canary_bound", zero=True)

    def batched_tokens(self, on_gpu: bool) -> int:
        """``max_num_batched_tokens``, or its default on the device."""
        configured = self.scheduler.max_num_batched_tokens
        return configured or max(8192 if on_gpu else 2048, self.concurrent_sequences(on_gpu))

    def concurrent_sequences(self, on_gpu: bool) -> int:
        """``max_num_seqs``, or its default on the device, which a smaller step bounds."""
        default = 256 if on_gpu else 64
        step = self.scheduler.max_num_batched_tokens or default
        return self.scheduler.max_num_seqs or min(default, step)

    def step_goal(self, on_gpu: bool) -> float | None:
        """Seconds of ``step_ms``, or its default on the device; None without a goal."""
        configured = self.scheduler.step_ms
        milliseconds = (100.0 if on_gpu else 0.0) if configured is None else configured
        return milliseconds / 1e3 or None
