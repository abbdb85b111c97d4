"""The indexes of a segment: one for every layer and head, built resumably.

The first and last tokens (sink and local) are not indexed, because every row reads them. Sink keys
would also be neighbours of most keys and mislead searches."""

import hashlib
import json
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index.base import CPU, Arrays, KVIndex
from looseleaf.index.choosing import choose_index
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.make import build_index, load_index

_log = logging.getLogger(__name__)
Unit = tuple[int, int]
"""A layer and a head."""
OnProgress = Callable[[int, int], None]
T = TypeVar("T")
R = TypeVar("R")


@runtime_checkable
class SegmentVectors(Protocol):
    """Source of a segment's keys and queries, all rotated into its frame."""

    def keys(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """Keys of all tokens."""
        ...

    def queries(self, layer: int, qo_head: int) -> Float[Tensor, "queries head_dim"]:
        """Training queries: those of the segment's own prefill, or a sample of them."""
        ...


@runtime_checkable
class SegmentValues(SegmentVectors, Protocol):
    """`SegmentVectors` with values, required by an index with ``estimate``."""

    def value_rows(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """Values of all tokens."""
        ...


@dataclass(frozen=True)
class Heads:
    """Layers and heads of a model's attention."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def units(self, config: IndexConfig) -> list[Unit]:
        """All (layer, head) pairs with an index of their own; heads as in ``config.per``."""
        count = self.num_kv_heads if config.per == "kv_head" else self.num_qo_heads
        return [(layer, head) for layer in range(self.num_layers) for head in range(count)]

    def kv_head(self, head: int, config: IndexConfig) -> int:
        """The KV head whose keys the index of ``head`` contains."""
        return head if config.per == "kv_head" else head // self.group


@dataclass(eq=False)
class SegmentIndex:
    """Indexes by layer and head over keys ``sink`` to ``num_tokens - local - 1``.

    Ids of hits count from key ``sink``. Callers read the keys outside of that range exactly.
    """

    config: IndexConfig
    heads: Heads
    num_tokens: int
    units: dict[Unit, KVIndex]

    @property
    def indexed(self) -> range:
        """The indexed tokens."""
        return indexed_tokens(self.num_tokens, self.config)

    def at(self, layer: int, qo_head: int) -> KVIndex:
        """The index for queries of ``qo_head``."""
        shared = self.config.per == "kv_head"
        return self.units[layer, qo_head // self.heads.group if shared else qo_head]

    @property
    def num_bytes(self) -> int:
        """Bytes of all indexes, without the stored keys."""
        return sum(index.num_bytes for index in self.units.values())

    def arrays(self) -> Arrays:
        """All indexes as named arrays, the side-car of the segment."""
        header = {
            "config": asdict(self.config),
            "heads": asdict(self.heads),
            "num_tokens": self.num_tokens,
        }
        arrays: Arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        for (layer, head), index in self.units.items():
            arrays |= {f"{layer}.{head}.{name}": array for name, array in index.arrays().items()}
        return arrays

    @classmethod
    def load(cls, arrays: Arrays, vectors: SegmentVectors) -> "SegmentIndex":
        """The inverse of `arrays`, over the keys of the same segment.

        Raises InvalidOption if arrays are missing, damaged or of another segment."""
        try:
            header = json.loads(bytes(np.asarray(arrays["header"], dtype=np.uint8)))
            config, heads = IndexConfig(**header["config"]), Heads(**header["heads"])
            num_tokens = int(header["num_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidOption(f"an index without a header ({error}): build it again") from error
        by_unit: dict[str, Arrays] = {}
        for name, array in arrays.items():
            prefix, _, suffix = name.rpartition(".")
            by_unit.setdefault(prefix, {})[suffix] = array
        units: dict[Unit, KVIndex] = {}
        for layer, head in heads.units(config):
            keys = _keys(vectors, (layer, head), heads, config, num_tokens)
            units[layer, head] = load_index(by_unit.get(f"{layer}.{head}", {}), keys, config)
        return cls(config, heads, num_tokens, units)


def indexed_tokens(num_tokens: int, config: IndexConfig) -> range:
    """The indexed tokens of a segment; empty if sink and local tokens cover it."""
    last = num_tokens - config.local
    return range(min(config.sink, last), last) if last > config.sink else range(0)


def build_segment(
    vectors: SegmentVectors,
    num_tokens: int,
    heads: Heads,
    config: IndexConfig,
    *,
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
    device: torch.device = CPU,
    workers: int = 1,
) -> SegmentIndex:
    """Build all indexes of a segment.

    With a ``folder`` each finished index is stored there, and an interrupted build resumes; files
    of other keys or sizes are ignored. ``on_progress(finished, total)`` counts indexes. ``workers``
    indexes are built concurrently; exhaustive comparisons run on ``device``. Raises InvalidOption
    for keys that are not finite, and for a graph without queries."""
    pairs = heads.units(config)
    finished, threads_each = count(1), max(1, torch.get_num_threads() // workers)

    def build(unit: Unit) -> KVIndex:
        keys = _keys(vectors, unit, heads, config, num_tokens)
        part = None if folder is None else folder / _part_name(unit, keys, config)
        index = None if part is None else _read_part(part, keys, config)
        if index is None:
            queries = _queries(vectors, unit, heads, config)
            index = _build(keys, config, queries, device, threads_each)
            if config.estimate:
                _sum_values(index, vectors, unit, heads, num_tokens)
            if part is not None:
                _keep_part(part, index.arrays())
        if on_progress is not None:
            on_progress(next(finished), len(pairs))
        return index

    if on_progress is not None:
        on_progress(0, len(pairs))
    if workers == 1:
        return SegmentIndex(config, heads, num_tokens, {unit: build(unit) for unit in pairs})
    with ThreadPoolExecutor(workers, "looseleaf-indexing") as threads:
        indexes = bounded_map(threads, build, pairs, 2 * workers)
        units = dict(zip(pairs, indexes, strict=True))
    return SegmentIndex(config, heads, num_tokens, units)


def bounded_map(
    threads: Executor, function: Callable[[T], R], items: Iterable[T], most: int
) -> Iterator[R]:
    """``function`` of every item, in order, with at most ``most`` submitted futures.

    The bound keeps the exit of the interpreter short, which waits for all submitted futures."""
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(pending) >= most:
                yield pending.popleft().result()
            pending.append(threads.submit(function, item))
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _keys(
    vectors: SegmentVectors, unit: Unit, heads: Heads, config: IndexConfig, num_tokens: int
) -> KeyVectors:
    layer, head = unit
    keys = vectors.keys(layer, heads.kv_head(head, config))
    if len(keys) != num_tokens:
        raise InvalidOption(f"the segment has {num_tokens} tokens and {len(keys)} keys")
    tokens = indexed_tokens(num_tokens, config)
    return KeyVectors.create(keys[tokens.start : tokens.stop], config.keys)


def _queries(
    vectors: SegmentVectors, unit: Unit, heads: Heads, config: IndexConfig
) -> Float[Tensor, "queries head_dim"] | None:
    if config.kind not in ("auto", "graph"):
        return None
    layer, head = unit
    group: Sequence[int] = [head]
    if config.per == "kv_head":
        group = range(head * heads.group, (head + 1) * heads.group)
    return torch.cat([vectors.queries(layer, qo_head) for qo_head in group])


def _sum_values(
    index: KVIndex, vectors: SegmentVectors, unit: Unit, heads: Heads, num_tokens: int
) -> None:
    if not isinstance(vectors, SegmentValues) or not isinstance(index, IvfIndex):
        raise InvalidOption("estimate needs an ivf index and values: give both")
    layer, head = unit
    tokens = indexed_tokens(num_tokens, index.config)
    values = vectors.value_rows(layer, heads.kv_head(head, index.config))
    index.sum_values(values[tokens.start : tokens.stop])


def _build(
    keys: KeyVectors,
    config: IndexConfig,
    queries: Tensor | None,
    device: torch.device,
    threads: int,
) -> KVIndex:
    if config.kind != "auto":
        return build_index(keys, config, queries, device, threads)
    if queries is None or len(queries) < 2 or len(keys) <= config.top:
        return build_index(keys, replace(config, kind="flat"))
    return choose_index(keys, queries, config, device=device, threads=threads).index


def _part_name(unit: Unit, keys: KeyVectors, config: IndexConfig) -> str:
    digest = hashlib.blake2b(repr(config).encode(), digest_size=12)
    raw = keys.vectors[: len(keys)].contiguous()
    digest.update(raw.view(torch.uint8).numpy().tobytes() if len(raw) else b"")
    return f"{unit[0]}-{unit[1]}-{digest.hexdigest()}.npz"


def _read_part(part: Path, keys: KeyVectors, config: IndexConfig) -> KVIndex | None:
    try:
        with part.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return load_index({name: stored[name] for name in stored.files}, keys, config)
    except FileNotFoundError:
        return None
    except Exception as error:
        # np.load raises many kinds of errors for damaged files
        _log.warning("%s can't be read: the index is built again: %s", part, error)
        return None


def _keep_part(part: Path, arrays: Arrays) -> None:
    """Keep a finished part; a disk that does not take it costs a build that is cut off its time."""
    try:
        _write_part(part, arrays)
    except OSError as error:
        _log.warning("a finished part of an index is not kept in %s: %s", part.parent, error)


def _write_part(part: Path, arrays: Arrays) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=part.parent, suffix=".part", delete=False) as file:
        try:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        except BaseException:
            # frees the space of a full disk
            os.unlink(file.name)
            raise
    os.replace(file.name, part)
