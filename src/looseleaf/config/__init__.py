"""The configuration of the library: frozen dataclasses, validated at construction.

Each default is defined once. This package does not import torch, so that its import is cheap.
"""

from looseleaf.config.engine import (
    CacheConfig,
    CpuKernels,
    DType,
    EngineConfig,
    Quantize,
    SchedulerConfig,
)
from looseleaf.config.experts import ExpertConfig
from looseleaf.config.fuse import EvaluatedSelector, Fuse, FuseSelector
from looseleaf.config.index import IndexConfig, IndexKeys, IndexKind, IndexPer
from looseleaf.config.model import (
    LatentConfig,
    LayerHeads,
    LayerInputs,
    ModelConfig,
    Quantization,
    QueryScaling,
    RopeConfig,
    RopeLaw,
)
from looseleaf.config.policy_file import PolicyFile
from looseleaf.config.revise import MAX_WINDOW, Local, Revise
from looseleaf.config.select import (
    EVICTING,
    SCORING,
    GroupRule,
    LayerBudgets,
    Select,
    SelectPolicy,
    share_of,
)
from looseleaf.config.server import Reuse, ServerConfig
from looseleaf.config.tiers import TierConfig, TierPacking

__all__ = [
    "CacheConfig",
    "CpuKernels",
    "DType",
    "EVICTING",
    "EngineConfig",
    "EvaluatedSelector",
    "ExpertConfig",
    "Fuse",
    "FuseSelector",
    "GroupRule",
    "LatentConfig",
    "LayerHeads",
    "LayerInputs",
    "LayerBudgets",
    "Local",
    "IndexConfig",
    "IndexKeys",
    "IndexKind",
    "IndexPer",
    "MAX_WINDOW",
    "ModelConfig",
    "PolicyFile",
    "Quantization",
    "Quantize",
    "QueryScaling",
    "Reuse",
    "Revise",
    "RopeConfig",
    "RopeLaw",
    "SCORING",
    "SchedulerConfig",
    "Select",
    "SelectPolicy",
    "ServerConfig",
    "TierConfig",
    "TierPacking",
    "share_of",
]
