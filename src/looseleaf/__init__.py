"""Looseleaf: LLM inference with a loose-leaf KV cache.

Documents are computed once and read at any position, in any order, by any number of requests.
Public names are imported on first use, so that ``import looseleaf`` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looseleaf.config import (
        CacheConfig,
        EngineConfig,
        Fuse,
        IndexConfig,
        Revise,
        SchedulerConfig,
        Select,
        TierConfig,
    )
    from looseleaf.engine.reports.outputs import CompletionOutput, RequestOutput, ReuseReport
    from looseleaf.errors import LooseleafError
    from looseleaf.llm.async_llm import AsyncLLM
    from looseleaf.llm.llm import LLM
    from looseleaf.prompt.request import Document
    from looseleaf.sampling_params import Grammar, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Document",
    "Fuse",
    "Select",
    "Revise",
    "SamplingParams",
    "Grammar",
    "RequestOutput",
    "CompletionOutput",
    "ReuseReport",
    "EngineConfig",
    "CacheConfig",
    "SchedulerConfig",
    "TierConfig",
    "IndexConfig",
    "LooseleafError",
    "__version__",
]

_MODULES = {
    "LLM": "looseleaf.llm.llm",
    "AsyncLLM": "looseleaf.llm.async_llm",
    "Document": "looseleaf.prompt.request",
    "Fuse": "looseleaf.config",
    "Select": "looseleaf.config",
    "Revise": "looseleaf.config",
    "SamplingParams": "looseleaf.sampling_params",
    "Grammar": "looseleaf.sampling_params",
    "RequestOutput": "looseleaf.engine.reports.outputs",
    "CompletionOutput": "looseleaf.engine.reports.outputs",
    "ReuseReport": "looseleaf.engine.reports.outputs",
    "EngineConfig": "looseleaf.config",
    "CacheConfig": "looseleaf.config",
    "SchedulerConfig": "looseleaf.config",
    "TierConfig": "looseleaf.config",
    "IndexConfig": "looseleaf.config",
    "LooseleafError": "looseleaf.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
