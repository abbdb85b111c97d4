"""Weights of a decoder from safetensors or GGUF files, fused for its products.

q, k and v become one matrix, as do gate and up. Parts are read into it in its final dtype and on
its final device, so loading never holds two copies.
"""

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig, Quantization
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.checkpoint import list_tensors, misfit, shortened
from looseleaf.models.checkpoint.expert_tensors import (
    padded_router,
    read_experts,
    read_router,
)
from looseleaf.models.checkpoint.gguf.blocks import block_matrix, copy_values, keeps_values
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry
from looseleaf.models.checkpoint.header import FLOATS, TensorEntry
from looseleaf.models.checkpoint.interleaved_experts import gguf_blocks
from looseleaf.models.checkpoint.latent_tensors import fused_tensors, read_latent
from looseleaf.models.checkpoint.scaled_tensors import (
    UNUSED,
    StoredMatrix,
    decode,
    find_stored,
)
from looseleaf.models.checkpoint.tensor_names import EMBEDDING, HEAD, by_canonical_name
from looseleaf.models.layers import DecoderWeights, LayerWeights, Norm
from looseleaf.models.linear import Projection, pack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.quantized_linear.formats import CHUNK
from looseleaf.ops.dense.rms_norm.native import has_native_norm
from looseleaf.ops.dense.scaled_linear import (
    TILE,
    TILE_FEATURES,
    Codes,
    ScaledMatrix,
    dequantize,
    fits,
    stack,
)
from looseleaf.ops.dense.scaled_linear import (
    quantize as quantize_matrix,
)
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix

_log = logging.getLogger(__name__)

# more threads wait for memory and for each other
_MAX_THREADS = 8
# rows per comparison
_COMPARED_ROWS = 4096
_FUSED_GATES = ("phi3", "glm", "glm4")
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.")
# families whose layers after the last predict further tokens, which the decoder does not use
_PREDICTING = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")
# buffers in old checkpoints that the decoder does not need
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$")


class _NormNames(NamedTuple):
    """A family's names of the norms before and after attention and MLP."""

    input: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    output: str = "post_attention_layernorm"
    down: str = "post_feedforward_layernorm"


_NORM_NAMES = {
    "gemma2": _NormNames(mlp="pre_feedforward_layernorm"),
    "gemma3_text": _NormNames(mlp="pre_feedforward_layernorm"),
    "glm4": _NormNames(output="post_self_attn_layernorm", down="post_mlp_layernorm"),
}


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    packed: bool = True,
    threads: int | None = None,
    native: bool = True,
    quantize: Codes | None = None,
) -> DecoderWeights:
    """All weights of the checkpoint in ``folder``, in ``dtype`` on ``device``.

    ``packed`` allows matrices in this machine's fastest layout; packing copies each matrix.
    ``native`` allows C kernels, which need a C compiler.
    ``quantize`` narrows 16-bit matrices of layers, one after another.
    ``threads`` is the number of layers to read concurrently, by default the cores, at most eight.
    Raises CorruptCheckpoint if a tensor is missing, unknown, truncated or has a wrong shape, before
    the first read.
    """
    entries = by_canonical_name(folder, list_tensors(folder))
    checker = _Checker(folder, entries, config.quantization)
    _assemble(checker, config, threads=1)
    checker.check_all_used(config)
    target = torch.device(device)
    native = native and has_native_norm(dtype, target)
    with _Reader(
        folder, entries, dtype, target, packed, native, config.quantization, quantize
    ) as reader:
        return _assemble(reader, config, threads or min(_MAX_THREADS, os.cpu_count() or 1))


def _assemble(reader: "_Checker", config: ModelConfig, threads: int) -> DecoderWeights:
    final = "model.final_layernorm" if config.family == "phi" else "model.norm"
    embedding, lm_head = _ends(reader, config)
    with ThreadPoolExecutor(threads, "looseleaf-weights") as pool:
        layers_of = range(config.num_layers)
        layers = tuple(pool.map(lambda index: _layer(reader, config, index), layers_of))
    return DecoderWeights(
        embedding, layers, reader.norm(final, config.hidden_size, config), lm_head
    )


def _ends(reader: "_Checker", config: ModelConfig) -> tuple[Tensor | QuantizedWeight, Projection]:
    """Embedding and head: one matrix if tied, unless the stored matrices differ."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tied = config.tie_word_embeddings
    # Transformers ties the missing matrix to the stored matrix
    source = HEAD if tied and HEAD in reader and EMBEDDING not in reader else EMBEDDING
    embedding = reader.matrix([source], [vocab], hidden)
    if tied and (
        source == HEAD or HEAD not in reader or reader.agree(EMBEDDING, HEAD, (vocab, hidden))
    ):
        head = embedding
    else:
        head = reader.matrix([HEAD], [vocab], hidden)
    bias = reader.fused(["lm_head.bias"], [(vocab,)]) if config.lm_head_bias else None
    return embedding, reader.settle(Projection(head, bias))


def _layer(reader: "_Checker", config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner, fused = config.hidden_size, config.intermediate_size, config.family == "phi3"
    norms = _NORM_NAMES.get(config.family, _NormNames())
    latent = None if config.latent is None else read_latent(reader, config, attention)
    q_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_names = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
    qkv_sizes = [q_size + 2 * kv_size] if fused else [q_size, kv_size, kv_size]
    if config.latent is not None:
        qkv_names, qkv_sizes = fused_tensors(config)
    up_names, up_sizes = ["gate_proj", "up_proj"], [inner, inner]
    if config.family in _FUSED_GATES:
        up_names, up_sizes = ["gate_up_proj"], [2 * inner]
    elif not config.gated_mlp:
        up_names, up_sizes = ["fc1"], [inner]
    output_name = "dense" if config.family == "phi" else "o_proj"
    down_name = "down_proj" if config.gated_mlp else "fc2"

    if config.has_experts(index):
        (gate_up, down), router = (
            read_experts(reader, config, prefix),
            read_router(reader, config, prefix),
        )
    else:
        router, bias = None, config.mlp_bias
        gate_up = reader.projection([mlp + n for n in up_names], up_sizes, hidden, bias)
        down = reader.projection([mlp + down_name], [hidden], inner, bias)

    def norm(name: str, exists: bool) -> Norm | None:
        return reader.norm(prefix + name, hidden, config) if exists else None

    def head_norm(name: str, size: int) -> Norm | None:
        size = size if config.joint_qk_norm else config.head_dim
        return reader.norm(attention + name, size, config) if config.qk_norm else None

    sinks = None
    if config.sinks:
        sinks = reader.fused([attention + "sinks"], [(config.num_qo_heads,)], wide=True)
    return LayerWeights(
        input_norm=norm(norms.input, config.pre_norms),
        qkv=reader.projection(
            [attention + n for n in qkv_names], qkv_sizes, hidden, config.qkv_bias
        ),
        output=reader.projection(
            [attention + output_name], [hidden], config.output_dim, config.output_bias
        ),
        mlp_norm=norm(norms.mlp, config.pre_norms and not config.parallel_residual),
        gate_up=gate_up,
        down=down,
        router=router,
        q_norm=head_norm("q_norm", q_size),
        k_norm=head_norm("k_norm", kv_size),
        output_norm=norm(norms.output, config.post_norms),
        down_norm=norm(norms.down, config.post_norms),
        sinks=sinks,
        latent=latent,
    )


class _Checker:
    """Checks the tensors that a decoder needs against the headers; reads no data.

    Its tensors have shapes and no memory.
    """

    _native_norms = False

    def __init__(
        self, folder: Path, entries: dict[str, TensorEntry], quantization: Quantization | None
    ) -> None:
        self._folder, self._entries, self._quantization = folder, entries, quantization
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def projection(self, names: list[str], sizes: list[int], fan_in: int, bias: bool) -> Projection:
        weight = self.narrow(self.matrix([name + ".weight" for name in names], sizes, fan_in))
        biases, shapes = [name + ".bias" for name in names], [(size,) for size in sizes]
        # quantized products add their bias in fp32
        wide = isinstance(weight, QuantizedWeight)
        added = self.fused(biases, [*shapes], wide=wide) if bias else None
        return self.settle(Projection(weight, added))

    def matrix(self, names: list[str], sizes: list[int], fan_in: int) -> Tensor | QuantizedWeight:
        """The matrices ``names`` one below the other, in their blocks if all are quantized."""
        return self.fused(names, [(size, fan_in) for size in sizes])

    def narrow(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """The weight of a layer, quantized if that was asked for."""
        return weight

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The uint8 tensor ``name``, on the CPU."""
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptCheckpoint(f"{self._folder} lacks {name}; {misfit(self._folder)}")
        if entry.dtype != "U8" or entry.shape != shape:
            raise CorruptCheckpoint(
                f"{self._folder}: {entry.name} is {entry.dtype[:20]} {list(entry.shape)}, "
                f"config.json asks for U8 {list(shape)}; config.json and the weights do not fit "
                "together"
            )
        self._used.add(name)
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def mxfp4(self, codes: Tensor, scales: Tensor) -> Tensor | QuantizedWeight:
        """Experts in MXFP4: in their bits where products read them, else their values.

        ``codes`` are ``[features, columns / 2]``, ``scales`` ``[features, columns / 32]``."""
        return torch.empty(len(codes), 2 * codes.shape[1], device="meta")

    def settle(self, projection: Projection) -> Projection:
        """``projection`` in its final layout."""
        return projection

    def router(self, weight: Tensor) -> Tensor:
        """A router's matrix in its final dtype and layout."""
        return weight

    def norm(self, name: str, size: int, config: ModelConfig) -> Norm:
        if config.norm_offset:
            # Transformers adds the offset in fp32 and rounds the norm's result only: bf16 would
            # round a weight near 1
            wide = self.fused([name + ".weight"], [(size,)], wide=True)
            return Norm(wide + config.norm_offset, native=self._native_norms)
        weight = self.fused([name + ".weight"], [(size,)])
        if config.norm == "rms":
            return Norm(weight, native=self._native_norms)
        return Norm(weight, self.fused([name + ".bias"], [(size,)]))

    def fused(self, names: list[str], shapes: list[tuple[int, ...]], wide: bool = False) -> Tensor:
        """The tensors ``names`` of ``shapes``, concatenated along dim 0; in fp32 if ``wide``."""
        stored = {name: self._find(name, shape) for name, shape in zip(names, shapes, strict=True)}
        missing = [n for n in names if n not in self._entries and stored[n] is None]
        if missing:
            raise CorruptCheckpoint(
                f"{self._folder} lacks {shortened(missing)}; {misfit(self._folder)}"
            )
        for name, shape in zip(names, shapes, strict=True):
            codes = stored[name]
            if codes is None:
                self._check(self._entries[name], shape)
            self._used.update([name] if codes is None else codes.names)
        return torch.empty((_rows(shapes), *shapes[0][1:]), device="meta")

    def agree(self, first: str, second: str, shape: tuple[int, int]) -> bool:
        """Whether two matrices have the same values in the model's dtype."""
        self.fused([first, second], [shape, shape])
        return True

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        """The stored form of a quantized matrix."""
        if len(shape) != 2:
            return None
        return find_stored(self._quantization, self._entries, name, (shape[0], shape[1]))

    def check_all_used(self, config: ModelConfig) -> None:
        ignored = {name for name in self._entries if _IGNORED.match(name)}
        if config.family in _PREDICTING:
            layers = {name: _LAYER.match(name) for name in self._entries}
            ignored |= {
                n for n, match in layers.items() if match and int(match[1]) >= config.num_layers
            }
        if self._quantization is not None:
            ignored |= {n for n in self._entries if n.rpartition(".")[2] in UNUSED}
        unused = set(self._entries) - self._used - ignored
        unknown = sorted(self._entries[name].name for name in unused)
        if unknown:
            raise CorruptCheckpoint(
                f"{self._folder} holds tensors that a {config.family} model of this shape has "
                f"no place for: {shortened(unknown)}; config.json and the weights do not fit "
                "together"
            )

    def _check(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if entry.dtype not in FLOATS and not isinstance(entry, BlockEntry):
            raise UnsupportedModel(
                f"{self._folder}: {entry.name} is stored as {entry.dtype[:200]} without scales; "
                "use a checkpoint in float32, float16 or bfloat16, or one with its scales"
            )
        if entry.shape != shape:
            raise CorruptCheckpoint(
                f"{self._folder}: {entry.name} has shape {list(entry.shape)}, config.json asks "
                f"for {list(shape)}; config.json and the weights do not fit together"
            )


class _Reader(_Checker):
    """Reads tensors by name into fused tensors. Each thread opens its own files."""

    def __init__(
        self,
        folder: Path,
        entries: dict[str, TensorEntry],
        dtype: torch.dtype,
        device: torch.device,
        packed: bool,
        native: bool,
        quantization: Quantization | None,
        quantize: Codes | None,
    ) -> None:
        super().__init__(folder, entries, quantization)
        self._quantize = quantize
        self._dtype, self._device, self._packed = dtype, device, packed
        self._native_norms = native
        # without C kernels a product would dequantize its blocks at every call
        self._keeps_blocks = packed and native
        self._stack, self._local, self._lock = ExitStack(), local(), Lock()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def narrow(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if self._quantize is None or not isinstance(weight, Tensor):
            return weight
        if weight.shape[1] % TILE or weight.shape[0] % TILE_FEATURES:
            return weight
        narrowed = quantize_matrix(weight, self._quantize)
        return QuantizedWeight([narrowed.laid_out()], self._dtype)

    def settle(self, projection: Projection) -> Projection:
        """``projection`` in its final layout; packing copies."""
        is_plain = isinstance(projection.weight, Tensor)
        return pack(projection) if self._packed and is_plain else projection

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name)

    def mxfp4(self, codes: Tensor, scales: Tensor) -> Tensor | QuantizedWeight:
        if self._device.type == "cuda" and self._dtype.itemsize == 2:
            matrix = Mxfp4Matrix(codes.to(self._device), scales.to(self._device))
            return QuantizedWeight([matrix], self._dtype)
        if self._keeps_blocks and self._device.type == "cpu":
            return QuantizedWeight.create([gguf_blocks(codes, scales)], self._dtype)
        whole = torch.empty(len(codes), 2 * codes.shape[1], dtype=self._dtype, device=self._device)
        # in parts, since values in fp32 take twice the memory
        for start in range(0, len(codes), _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            whole[rows] = Mxfp4Matrix(codes[rows], scales[rows]).dequantize()
        return whole

    def router(self, weight: Tensor) -> Tensor:
        # a CPU's logits are fp32 products
        return padded_router(weight.to(self._dtype)) if weight.is_cuda else weight

    def matrix(self, names: list[str], sizes: list[int], fan_in: int) -> Tensor | QuantizedWeight:
        blocks = [self._blocks(name) for name in names] if self._keeps_blocks else [None]
        if None not in blocks:
            return QuantizedWeight.create([b for b in blocks if b is not None], self._dtype)
        stored = [self._find(n, (size, fan_in)) for n, size in zip(names, sizes, strict=True)]
        if self._device.type == "cuda" and None not in stored:
            matrices = [self._decode(s) for s in stored if s is not None]
            first = matrices[0]
            if all(fits(m) and m.same_form(first) for m in matrices):
                return QuantizedWeight([stack(matrices).laid_out()], self._dtype)
        return super().matrix(names, sizes, fan_in)

    def _blocks(self, name: str) -> BlockMatrix | None:
        """The matrix in the bits of its file, None where it is converted."""
        entry = self._entries.get(name)
        if isinstance(entry, BlockEntry):
            return block_matrix(entry, self._dtype)
        keeps = entry is not None and entry.dtype == "BF16" and not entry.shape[-1] % CHUNK
        if not keeps or not keeps_values("BF16", self._dtype):
            return None
        return BlockMatrix("BF16", self._read(name).contiguous().view(torch.uint8))

    def _decode(self, stored: StoredMatrix) -> ScaledMatrix:
        assert self._quantization is not None, "only a quantized checkpoint has codes"
        return decode(stored, self._quantization, self._read).to(self._device)

    def fused(self, names: list[str], shapes: list[tuple[int, ...]], wide: bool = False) -> Tensor:
        """The tensors ``names`` of ``shapes``, concatenated along dim 0; in fp32 if ``wide``."""
        size = (_rows(shapes), *shapes[0][1:])
        dtype = torch.float32 if wide else self._dtype
        whole = torch.empty(size, dtype=dtype, device=self._device)
        for part, name in zip(whole.split([shape[0] for shape in shapes]), names, strict=True):
            stored = self._find(name, tuple(part.shape))
            if stored is not None:
                part.copy_(dequantize(self._decode(stored), torch.float32))
                continue
            entry = self._entries[name]
            if isinstance(entry, BlockEntry):
                copy_values(entry, part)
            else:
                part.copy_(self._read(name))
        return whole

    def agree(self, first: str, second: str, shape: tuple[int, int]) -> bool:
        for start in range(0, shape[0], _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            values = [self._read(name, rows).to(self._dtype) for name in (first, second)]
            if not torch.equal(*values):
                _log.warning(
                    "%s: tie_word_embeddings is true, and the values of %s and %s differ: the "
                    "model runs with both, as in Transformers; set tie_word_embeddings to false "
                    "in config.json", self._folder, first, second,
                )  # fmt: skip
                return False
        return True

    def _read(self, name: str, rows: slice | None = None) -> Tensor:
        from safetensors import SafetensorError, safe_open

        entry = self._entries[name]
        if isinstance(entry, BlockEntry):
            rows = rows or slice(0, entry.shape[0])
            values = torch.empty(len(range(entry.shape[0])[rows]), *entry.shape[1:])
            copy_values(entry, values, rows.start)
            return values
        try:
            files: dict[Path, Any] = self._local.__dict__.setdefault("files", {})
            if entry.path not in files:
                file = safe_open(str(entry.path), framework="pt")
                with self._lock:
                    files[entry.path] = self._stack.enter_context(file)
            file = files[entry.path]
            # get_tensor avoids a copy
            whole = rows is None
            tensor: Tensor = (
                file.get_tensor(entry.name) if whole else file.get_slice(entry.name)[rows]
            )
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpoint(
                f"{entry.path} can't be read ({error}); download it again"
            ) from error
        return tensor


def _rows(shapes: list[tuple[int, ...]]) -> int:
    return sum(shape[0] for shape in shapes)
