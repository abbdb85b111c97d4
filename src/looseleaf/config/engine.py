"""What an engine is made from besides the model: device, pool and scheduler."""

from dataclasses import dataclass, field
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_each,
    require_kinds,
    require_positive,
    require_share,
)
from looseleaf.config.tiers import TierConfig

DType = Literal["auto", "float32", "float16", "bfloat16"]
CpuKernels = Literal["auto", "native", "torch"]
KvDType = Literal["auto", "fp8"]
AttentionCosts = Literal["built-in", "measured"]


@dataclass(frozen=True)
class CacheConfig:
    """The device pool. ``num_pages`` wins over ``memory_gib``; with neither, the runner sizes
    it.
    """

    page_size: int = option(16, "tokens per page: 16, 32 or 64")
    num_pages: int | None = option(None, "pages in the pool; default: as memory_gib says")
    memory_gib: float | None = option(
        None, "memory of the pool in GiB; default: what the device can spare"
    )
    kv_dtype: KvDType = option(
        "auto",
        "what keys and values are stored in: auto (the model's dtype) or fp8 (e4m3: half the "
        "memory of 16 bits, three bits of precision)",
    )
    prefix_caching: bool = option(True, "keep full pages of text for requests that begin the same")

    def __post_init__(self) -> None:
        require_kinds(self)
        require_each(self, "16, 32 or 64", lambda size: size in (16, 32, 64), "page_size")
        require_positive(self, "num_pages", "memory_gib")


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step."""

    max_num_seqs: int = option(64, "sequences that run at once")
    max_num_batched_tokens: int | None = option(
        None,
        "tokens that one step computes at most, or a sixty-fourth more where that ends a prompt; "
        "default: 2048 on a CPU, 8192 on a GPU",
    )
    grouping: bool = option(
        True, "rows that read the same pages share one work item, whatever their offsets"
    )
    batch_invariant: bool = option(
        False, "attention splits and merges the same way whatever else is in the batch; slower"
    )

    def __post_init__(self) -> None:
        require_kinds(self)
        require_positive(self, "max_num_seqs")
        require(
            self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
            f"{self.max_num_seqs}, or running sequences leave no room for new ones",
            "max_num_batched_tokens",
            "max_num_seqs",
        )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is made from besides the model."""

    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    dtype: DType = option(
        "auto",
        "float32, float16 or bfloat16; auto: the checkpoint's, or float32 where that is faster",
    )
    max_model_len: int | None = option(
        None, "tokens of prompt and answer together; default: the model's limit"
    )
    cpu_kernels: CpuKernels = option(
        "auto",
        "what decodes on a CPU: native (C, compiled once on this machine), torch, or auto: native "
        "where there is a C compiler",
    )
    threads: int | None = option(
        None,
        "threads that a CPU computes with; default: as OMP_NUM_THREADS says, or as many as are "
        "fast at the start",
    )
    salt: str = option("", "caches with different salts share nothing")
    cuda_graphs: bool = option(
        True, "on a GPU, replay steps of few rows instead of launching every kernel"
    )
    attention_costs: AttentionCosts = option(
        "built-in",
        "what grouping and splitting are chosen by on a GPU: built-in (costs of an H200), or "
        "measured (at the first start with a shape, then kept on disk)",
    )
    canary_share: float = option(
        0.0,
        "share of the requests with a fuse policy whose answers are compared with full prefill's, "
        "in the background",
    )
    canary_bound: float = option(
        0.95, "share of those answers that must agree; below it, ratios of fuse policies are raised"
    )
    seed: int = option(0, "where the random draws of requests without a seed start")
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tiers: TierConfig = field(default_factory=TierConfig)

    def __post_init__(self) -> None:
        require_kinds(self)
        require_positive(self, "max_model_len", "threads")
        require_share(self, "canary_share", "canary_bound", zero=True)

    def batched_tokens(self, on_gpu: bool) -> int:
        """What a step computes at most: as asked for, or what the device is fast with."""
        asked = self.scheduler.max_num_batched_tokens
        return asked or max(8192 if on_gpu else 2048, self.scheduler.max_num_seqs)
