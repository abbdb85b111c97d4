"""The indexes of a whole segment: one for every layer and head, built in parts that survive a kill.

A segment's first and last keys are left out: they are always read, and the first ones, which most
queries look at, would be in everybody's list and lead every search astray."""

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
Place = tuple[int, int]
OnProgress = Callable[[int, int], None]
T = TypeVar("T")
R = TypeVar("R")


@runtime_checkable
class SegmentVectors(Protocol):
    """Where the keys and queries of a segment come from, all turned into its frame."""

    def keys(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """Keys of all tokens."""
        ...

    def queries(self, layer: int, qo_head: int) -> Float[Tensor, "queries head_dim"]:
        """Queries to learn from: those of the segment's own prefill, or some of them."""
        ...


@runtime_checkable
class SegmentValues(SegmentVectors, Protocol):
    """`SegmentVectors` with values, which an index that estimates takes too."""

    def value_rows(self, layer: int, kv_head: int) -> Float[Tensor, "tokens head_dim"]:
        """Values of all tokens."""
        ...


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention; an index unit is a layer and a head."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def units(self, config: IndexConfig) -> list[Place]:
        """Every place of an index: KV heads, or query heads."""
        count = self.num_kv_heads if config.per == "kv_head" else self.num_qo_heads
        return [(layer, head) for layer in range(self.num_layers) for head in range(count)]

    def kv_head(self, head: int, config: IndexConfig) -> int:
        """The KV head whose keys the index of ``head`` is over."""
        return head if config.per == "kv_head" else head // self.group


@dataclass(eq=False)
class SegmentIndex:
    """Indexes by layer and head over keys ``sink`` to ``num_tokens - local - 1``.

    A hit's id counts from key ``sink``. Whoever searches reads the others besides.
    """

    config: IndexConfig
    heads: Heads
    num_tokens: int
    units: dict[Place, KVIndex]

    @property
    def indexed(self) -> range:
        """The tokens that hits may name."""
        return indexed_tokens(self.num_tokens, self.config)

    def at(self, layer: int, qo_head: int) -> KVIndex:
        """The index that a query of ``qo_head`` searches."""
        shared = self.config.per == "kv_head"
        return self.units[layer, qo_head // self.heads.group if shared else qo_head]

    @property
    def num_bytes(self) -> int:
        """Bytes of all indexes, beside the keys."""
        return sum(index.num_bytes for index in self.units.values())

    def arrays(self) -> Arrays:
        """All indexes as named arrays, the side-car of the segment."""
        header = {"config": asdict(self.config), "heads": asdict(self.heads)}
        header["num_tokens"] = self.num_tokens  # type: ignore[assignment]
        named: Arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        for (layer, head), index in self.units.items():
            named |= {f"{layer}.{head}.{name}": array for name, array in index.arrays().items()}
        return named

    @classmethod
    def load(cls, arrays: Arrays, vectors: SegmentVectors) -> "SegmentIndex":
        """The indexes that `arrays` described, over the keys of the same segment.

        Raises InvalidOption if arrays are missing, damaged or of another segment."""
        try:
            header = json.loads(bytes(np.asarray(arrays["header"], dtype=np.uint8)))
            config, heads = IndexConfig(**header["config"]), Heads(**header["heads"])
            num_tokens = int(header["num_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidOption(f"an index without a header ({error}): build it again") from error
        named: dict[str, Arrays] = {}
        for name, array in arrays.items():
            place, _, own = name.rpartition(".")
            named.setdefault(place, {})[own] = array
        units: dict[Place, KVIndex] = {}
        for layer, head in heads.units(config):
            keys = _keys(vectors, (layer, head), heads, config, num_tokens)
            units[layer, head] = load_index(named.get(f"{layer}.{head}", {}), keys, config)
        return cls(config, heads, num_tokens, units)


def indexed_tokens(num_tokens: int, config: IndexConfig) -> range:
    """Which tokens of a segment are indexed: none, if sink and local ones are all there are."""
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

    With a ``folder`` every finished one is kept there, so that a build that was ended goes on where
    it stopped; parts of other keys or sizes are not taken. ``on_progress`` hears how many are done,
    of how many. ``workers`` of them are built at a time, whose comparisons of all keys run on
    ``device``. Raises InvalidOption for keys that are not finite, and a graph without queries."""
    places = heads.units(config)
    done, each = count(), max(1, torch.get_num_threads() // workers)

    def build(place: Place) -> KVIndex:
        keys = _keys(vectors, place, heads, config, num_tokens)
        part = None if folder is None else folder / _part_name(place, keys, config)
        found = None if part is None else _read_part(part, keys, config)
        if found is None:
            found = _build(keys, config, _queries(vectors, place, heads, config), device, each)
            if config.estimate:
                _sum_values(found, vectors, place, heads, num_tokens)
            if part is not None:
                _keep_part(part, found.arrays())
        if on_progress is not None:
            on_progress(next(done) + 1, len(places))
        return found

    if on_progress is not None:
        on_progress(0, len(places))
    if workers == 1:
        return SegmentIndex(config, heads, num_tokens, {place: build(place) for place in places})
    with ThreadPoolExecutor(workers, "looseleaf-indexing") as threads:
        built = few_ahead(threads, build, places, 2 * workers)
        units = dict(zip(places, built, strict=True))
    return SegmentIndex(config, heads, num_tokens, units)


def few_ahead(
    threads: Executor, act: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """``act`` of every item, in order, by ``threads``, of which ``ahead`` are handed in at a time:
    an interpreter that ends waits for all that was."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
            waiting.append(threads.submit(act, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for one in waiting:
            one.cancel()


def _keys(
    vectors: SegmentVectors, place: Place, heads: Heads, config: IndexConfig, num_tokens: int
) -> KeyVectors:
    layer, head = place
    keys = vectors.keys(layer, heads.kv_head(head, config))
    if len(keys) != num_tokens:
        raise InvalidOption(f"the segment has {num_tokens} tokens and {len(keys)} keys")
    tokens = indexed_tokens(num_tokens, config)
    return KeyVectors.create(keys[tokens.start : tokens.stop], config.keys)


def _queries(
    vectors: SegmentVectors, place: Place, heads: Heads, config: IndexConfig
) -> Float[Tensor, "queries head_dim"] | None:
    if config.kind not in ("auto", "graph"):
        return None
    layer, head = place
    group: Sequence[int] = [head]
    if config.per == "kv_head":
        group = range(head * heads.group, (head + 1) * heads.group)
    return torch.cat([vectors.queries(layer, qo_head) for qo_head in group])


def _sum_values(
    index: KVIndex, vectors: SegmentVectors, place: Place, heads: Heads, num_tokens: int
) -> None:
    if not isinstance(vectors, SegmentValues) or not isinstance(index, IvfIndex):
        raise InvalidOption("an index that estimates takes clusters and values: give both")
    layer, head = place
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


def _part_name(place: Place, keys: KeyVectors, config: IndexConfig) -> str:
    state = hashlib.blake2b(repr(config).encode(), digest_size=12)
    raw = keys.vectors[: len(keys)].contiguous()
    state.update(raw.view(torch.uint8).numpy().tobytes() if len(raw) else b"")
    return f"{place[0]}-{place[1]}-{state.hexdigest()}.npz"


def _read_part(part: Path, keys: KeyVectors, config: IndexConfig) -> KVIndex | None:
    try:
        with part.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return load_index({name: stored[name] for name in stored.files}, keys, config)
    except FileNotFoundError:
        return None
    except Exception as error:
        # whatever is wrong with it: it is built again and replaced
        _log.warning("%s can't be read and is built again: %s", part, error)
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
            # a full disk must not stay so
            os.unlink(file.name)
            raise
    os.replace(file.name, part)
