"""From a checkpoint's name to an engine: configuration, weights, tokenizer and pool on a device."""

import gc
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

import looseleaf.assets
from looseleaf.assets import REFERENCE_MODELS, checkpoint_of, folder_of
from looseleaf.config import (
    CpuKernels,
    EngineConfig,
    ModelConfig,
    PolicyFile,
    Quantize,
    RopeConfig,
)
from looseleaf.engine.engine import Engine, EngineParts
from looseleaf.engine.runner.runner import OnProgress, Runner, pool_dtype
from looseleaf.errors import CheckpointNotFound, EngineFault, InvalidOption, LooseleafError
from looseleaf.kv.keys import KeySpace
from looseleaf.llm.ranks import start_ranks
from looseleaf.machine.limits import available_memory
from looseleaf.machine.threads import ThreadChoice, fit_threads
from looseleaf.models import (
    Decoder,
    Tokenizer,
    find_checkpoint,
    load_weights,
    model_fingerprint,
    names_of_advice,
    read_config,
)
from looseleaf.models.checkpoint.checkpoint import list_tensors
from looseleaf.models.checkpoint.file_state import folder_state, require_unchanged
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry
from looseleaf.ops.dispatch import Implementation
from looseleaf.parallel import Ranks, Shard
from looseleaf.prompt.primer import RequestDefaults, primer_tokens
from looseleaf.rope.frames import model_rope_fingerprint
from looseleaf.tiers import Tiers

_log = logging.getLogger(__name__)

# above the context of any model; a larger value is an error or an attack on memory
_MAX_POSITIONS = 1 << 24

_CPU_IMPLEMENTATIONS: dict[CpuKernels, Implementation] = {
    "auto": "auto",
    "native": "native",
    "torch": "cpu",
}


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint on its device, which engines may share.

    ``shape`` has the RoPE law frozen at ``max_model_len``.
    """

    folder: Path
    shape: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    fingerprint: bytes
    max_model_len: int
    threads: ThreadChoice | None = None


def load_engine(
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    implementation: Implementation = "auto",
    on_progress: OnProgress = lambda stage, completed, total: None,
) -> Engine:
    """An engine over the checkpoint ``model``, a name as in `find_model`.

    ``on_progress(stage, completed, total)`` reports long stages. Raises InvalidOption and
    ModelError (CheckpointNotFound, CorruptCheckpoint, UnsupportedModel).
    """
    config = config or EngineConfig()
    if config.tensor_parallel > 1:
        folder, device = find_model(model), pick_device(config.device)
        Shard(0, config.tensor_parallel).require(read_config(folder))
        return start_ranks(partial(load_rank, folder, implementation), config, device)
    return make_engine(load_model(model, config), config, implementation, on_progress)


def load_rank(
    folder: Path, implementation: Implementation, config: EngineConfig, ranks: Ranks
) -> Engine:
    """The engine of one rank over its slices of the checkpoint ``folder``.

    Raises as `load_engine`, after all ranks have loaded their slices or failed."""
    return make_engine(
        load_together(partial(load_model, folder), config, ranks), config, implementation
    )


def load_together(
    load: Callable[[EngineConfig, Ranks], LoadedModel], config: EngineConfig, ranks: Ranks
) -> LoadedModel:
    """The model of this rank. Raises the first error of any rank."""
    loaded, error = None, None
    try:
        loaded = load(config, ranks)
    except LooseleafError as refusal:
        error = refusal
    first = ranks.link.agree("weights", error, lambda errors: next(filter(None, errors), None))
    if loaded is None or first is not None:
        raise first or EngineFault("a rank has no model: please report it")
    return loaded


def load_model(
    model: str | Path | None, config: EngineConfig, ranks: Ranks | None = None
) -> LoadedModel:
    """The checkpoint ``model`` with the device, dtype and length of ``config``.

    Its fingerprint reads whole files if the tiers of ``config`` outlive the process. With ``ranks``
    it is this rank's slice. Raises as `load_engine`.
    """
    folder = find_model(model)
    device = pick_device(config.device)
    files = folder_state(folder)
    shape = read_config(folder)
    max_model_len = _pick_length(config.max_model_len, shape, folder)
    shape = shape.frozen_at(max_model_len)
    # errors in small files are reported before the weights, which take minutes
    tokenizer = Tokenizer(folder)
    if tokenizer.last_token_id >= shape.vocab_size:
        name = tokenizer.written(tokenizer.last_token_id)
        _log.warning(
            "the tokenizer has tokens that the model does not have, such as %r: the model has %d; "
            "texts with one of them are refused", name, shape.vocab_size,
        )  # fmt: skip
    if advice := names_of_advice(folder):
        _log.info(
            "generation_config.json has %s: SamplingParams don't take that by themselves",
            ", ".join(advice),
        )
    dtype = _pick_dtype(config, shape, device)
    native = device.type == "cpu" and config.cpu_kernels != "torch"
    if device.type == "cpu":
        _compare_with_memory(folder, dtype, keeps_blocks=native)
    make_room(device)
    threads = fit_threads(config.threads, on_cpu=device.type == "cpu")
    _check_quantize(config.quantize, shape, device, dtype)
    weights = load_weights(
        folder, shape, dtype, device, native=native, quantize=config.quantize, ranks=ranks
    )
    if ranks is not None:
        shape = ranks.shard.local(shape)
    fingerprint = model_fingerprint(folder, whole=config.tiers.outlive)
    if config.quantize is not None:
        # keys of a narrowed model are others
        fingerprint = blake2b(fingerprint + config.quantize.encode(), digest_size=16).digest()
    require_unchanged(folder, files)
    return LoadedModel(
        folder, shape, Decoder(shape, weights), tokenizer, fingerprint, max_model_len, threads
    )


def _check_quantize(
    kind: Quantize | None, shape: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises InvalidOption for an option ``quantize`` that can't be followed."""
    if kind is None:
        return
    if device.type != "cuda":
        raise InvalidOption(
            f"quantize={kind!r} is for a GPU: on a CPU take a GGUF file of 4 to 8 bits", "quantize"
        )
    if shape.quantization is not None:
        raise InvalidOption(
            f"quantize={kind!r} is for 16-bit checkpoints, and this one is quantized by "
            f"{shape.quantization.method}: leave the option out",
            "quantize",
        )
    if dtype.itemsize != 2:
        raise InvalidOption(
            f"quantize={kind!r} needs 16-bit activations: add dtype='bfloat16'", "quantize"
        )


def make_room(device: torch.device) -> None:
    """Free GPU memory of unreferenced engines, which are reference cycles.

    PyTorch does not run the garbage collector when memory is short."""
    if device.type != "cpu":
        gc.collect()


def _compare_with_memory(folder: Path, dtype: torch.dtype, *, keeps_blocks: bool) -> None:
    """Log a warning if the weights exceed free memory, where the system may kill the process."""
    needed = sum(
        entry.end - entry.start
        if keeps_blocks and isinstance(entry, BlockEntry)
        else math.prod(entry.shape) * dtype.itemsize
        for entry in list_tensors(folder).values()
    )
    free = available_memory()
    if needed > free:
        _log.warning(
            "the weights take %.1f GiB and %.1f GiB of memory are free, so loading may fail or end "
            "the process: close other programs, raise the container's limit, or take a smaller "
            "model%s", needed / 2**30, free / 2**30,
            "" if dtype.itemsize == 2 else " or dtype='bfloat16'",
        )  # fmt: skip


def make_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    implementation: Implementation = "auto",
    on_progress: OnProgress = lambda stage, completed, total: None,
) -> Engine:
    """An engine with its own pool over a loaded model, which engines may share."""
    decoder, max_model_len = loaded.decoder, loaded.max_model_len
    defaults = _defaults_of(config, loaded)
    stored = pool_dtype(decoder, config.cache)
    # 8-bit keys depend on the dtype that computed them
    precision = str(stored) if stored == decoder.dtype else f"{stored} of {decoder.dtype}"
    keys = KeySpace.create(
        model=loaded.fingerprint,
        rope=model_rope_fingerprint(loaded.shape),
        kv_dtype=precision,
        salt=config.salt,
        page_size=config.cache.page_size,
    )
    if implementation == "auto" and decoder.device.type == "cpu":
        implementation = _CPU_IMPLEMENTATIONS[config.cpu_kernels]
    runner = Runner.create(decoder, config, max_model_len, implementation, on_progress)
    tiers = Tiers.create(config.tiers, runner.pool)
    return Engine(
        EngineParts(
            config, runner, loaded.tokenizer, keys, max_model_len, tiers, loaded.threads, defaults
        )
    )


def _defaults_of(config: EngineConfig, loaded: LoadedModel) -> RequestDefaults | None:
    """The defaults of the configured policy file, None without one. Raises InvalidOption."""
    if config.policy is None:
        return None
    policy = PolicyFile.read(config.policy)
    policy.require_model(loaded.shape)
    tokens = primer_tokens(loaded.tokenizer, policy.primer)
    return RequestDefaults(policy.fuse, tokens, loaded.max_model_len, policy.anchors)


def find_model(model: str | Path | None) -> Path:
    """The folder of a checkpoint by its path, its hub id or the name of a reference model.

    Reference models are ``looseleaf-reference``, the default for None, and
    ``looseleaf-reference-causal``. An existing folder wins. Raises CheckpointNotFound."""
    if model is None:
        return reference_model()
    if not isinstance(model, str | os.PathLike):
        raise CheckpointNotFound(
            f"a model is a folder, a hub id or a name, not {type(model).__name__}: write it as in "
            "LLM('folder')"
        )
    name = folder_of(str(model))
    return find_checkpoint(model) if name is None or Path(model).exists() else reference_model(name)


def reference_model(name: str = "block") -> Path:
    """The path of a reference model, by its name or its folder's name ``block`` or ``causal``.

    Raises CheckpointNotFound."""
    folder = checkpoint_of(name)
    if folder not in REFERENCE_MODELS.values():
        raise CheckpointNotFound(
            f"no reference model {name!r}: there are {', '.join(REFERENCE_MODELS)}"
        )
    return Path(looseleaf.assets.__path__[0]) / folder


def _pick_length(option: int | None, shape: ModelConfig, folder: Path) -> int:
    limit = longest_context(shape)
    if option is not None and limit is not None and option > limit:
        raise InvalidOption(
            f"max_model_len={option} is more than the {limit} tokens that this model can read: "
            "lower it, or leave it out",
            "max_model_len",
        )
    if option is None and shape.max_position_embeddings > _MAX_POSITIONS:
        raise InvalidOption(
            f"{folder / 'config.json'} says {shape.max_position_embeddings} positions, whose table "
            "takes gigabytes: give max_model_len",
            "max_model_len",
        )
    return option or shape.max_position_embeddings


def longest_context(shape: ModelConfig) -> int | None:
    """The longest context by the RoPE laws of a model's layers, in tokens; None if unlimited."""
    reaches = (_reach(rope, shape.max_position_embeddings) for rope in shape.ropes)
    return min((reach for reach in reaches if reach is not None), default=None)


def _reach(rope: RopeConfig, stated: int) -> int | None:
    if rope.law in ("none", "dynamic"):
        return None
    # these laws extend the trained length, which not every configuration includes
    if rope.law == "linear":
        return int(stated * max(rope.factor, 1.0))
    if rope.law == "yarn":
        return max(stated, int((rope.original_max_position_embeddings or stated) * rope.factor))
    return stated


def pick_device(name: str) -> torch.device:
    """The device ``name``; ``auto`` is a GPU if available, else the CPU.

    Raises InvalidOption for an unknown or absent device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOption(f"unknown device {name!r}: use auto, cpu or cuda", "device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidOption(
            f"device {name!r} is not available, since PyTorch sees no GPU: use cpu or auto",
            "device",
        )
    if device.type not in ("cpu", "cuda"):
        raise InvalidOption(f"device {name!r} is not supported: use cpu or cuda", "device")
    return device


def _pick_dtype(config: EngineConfig, shape: ModelConfig, device: torch.device) -> torch.dtype:
    name = shape.torch_dtype if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    if config.dtype == "auto" and device.type == "cpu" and dtype is not torch.float32:
        # half precision is slower than fp32 on CPUs without instructions for it
        fast = dtype is torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return dtype if fast else torch.float32
    return dtype
