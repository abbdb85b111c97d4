"""The cost model of attention: which rows share reads, and how far items are cut.

Times are of one KV head and one layer. A launch keeps a fixed number of programs in flight. A unit
(item, KV head) takes ``start`` and ``per_key`` for every key while all programs are busy, and
``per_key_alone`` while few are.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.ops.partial_attention.work_list import Tile

_SPLITS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# time of a key while all programs read to the end, relative to a launch with early ends
_FULL = 0.97
# mean pieces of a share: more are slower, since each has a start (docs/log.md)
_MOST_PIECES = 3
# shared memory of a multiprocessor, less the programs' own use
_SHARED_BYTES = 200 * 1024
# tiles of latent keys of 16 bits to measure
_LATENT_TILES = (
    *(Tile(16, 32, 4, 3, 2), Tile(16, 32, 4, 5, 2)),
    *(Tile(64, 32, 8, 3, 1), Tile(64, 32, 8, 5, 1), Tile(64, 64, 8, 2, 1)),
)
Counts = npt.NDArray[Any]


@dataclass(frozen=True)
class TileCost:
    """Costs of units of one tile, in microseconds, with ``programs`` in flight."""

    tile: Tile
    programs: int
    start: float
    per_key: float
    per_key_alone: float

    def makespan(self, units: float, keys_per_unit: float, total_keys: float) -> float:
        """Time of a launch of ``units`` that reads ``total_keys`` keys, at most ``keys_per_unit``
        each."""
        whole_rounds, rest = divmod(units, self.programs)
        busy = total_keys * self.per_key / self.programs
        if not rest:
            return busy + whole_rounds * self.start
        # programs of a partial last round share the memory bandwidth with fewer others
        last = keys_per_unit * max(self.per_key_alone, self.per_key * rest / self.programs)
        shared = keys_per_unit * self.per_key * rest / self.programs
        return busy - min(busy, shared) + last + (whole_rounds + 1) * self.start


@dataclass(frozen=True)
class GatherCost:
    """Costs of gathering keys before spans read them, per layer, in microseconds.

    Costs: ``launch``, ``per_key`` of a KV head, and ``listing``, the host's work per step. Gains:
    ``border`` for each span border that a unit crosses, and the share ``paged`` of the read time,
    since tiles come in one copy. Lists with replaced keys use ``masked_border`` and ``masked``."""

    launch: float
    per_key: float
    listing: float
    border: float
    paged: float
    masked_border: float
    masked: float


@dataclass(frozen=True)
class ReadBySpans:
    """The reads of new rows by spans: ``units`` (tiles times KV heads), which read ``unit_keys``
    keys and cross ``unit_borders`` span borders each on average. ``keys`` is the total, ``masked``
    means that some are replaced."""

    units: int
    unit_keys: float
    unit_borders: float
    keys: int
    masked: bool


@dataclass(frozen=True)
class CostModel:
    """``narrow`` reads for one row or few, ``wide`` for many. ``launch`` is the cost of one more
    kernel, ``per_state`` of merging one state of a row and KV head. ``gather`` is None where keys
    are read in place. Masked reads of at most ``one_group`` units use one consumer warpgroup."""

    narrow: TileCost
    wide: TileCost
    launch: float
    per_state: float
    gather: GatherCost | None = None
    one_group: int = 0
    share_keys: int = 1024

    def worth_gathering(self, read: ReadBySpans, num_kv_heads: int) -> bool:
        """Whether gathering the keys first is faster."""
        cost = self.gather
        if cost is None or self.groups_for(read) == 1:
            return False
        # few units are cut into concurrent parts
        rounds = read.units / self.wide.programs
        border, share = cost.border, cost.paged
        if read.masked:
            border, share = cost.masked_border, cost.masked
        gain = rounds * (share * read.unit_keys * self.wide.per_key + border * read.unit_borders)
        return gain > cost.launch + cost.listing + cost.per_key * read.keys * num_kv_heads

    def groups_for(self, read: ReadBySpans) -> int:
        """Consumer warpgroups of the programs for this read: two share key tiles, one halves the
        program. One allows twice the programs and never waits at span borders, which pays for few
        rows."""
        return 1 if read.masked and read.units <= self.one_group else 2

    def wide_gain(self, num_packed: int, num_keys: int) -> float:
        """Time that the wide tile saves over narrow ones, for rows that read the same keys."""
        return self._device_time(self.narrow, num_packed, num_keys) - self._device_time(
            self.wide, num_packed, num_keys
        )

    def worth_sharing(self, num_rows: int, group: int, num_keys: int) -> bool:
        """Whether reading these keys together is faster than a separate read per row."""
        alone = num_rows * self._device_time(self.narrow, group, num_keys, start=False)
        packed = num_rows * group
        together = min(
            self._device_time(tile, packed, num_keys) for tile in (self.narrow, self.wide)
        )
        # each row's state of the shared keys costs a merge
        return together + num_rows * self.per_state < alone

    def tile_read(
        self,
        cost: TileCost,
        item_keys: Counts,
        item_entries: Counts,
        num_kv_heads: int,
        *,
        merged: bool = True,
    ) -> "TileRead":
        """Time estimates for items of these keys and entries in one tile. ``merged``: rows have
        several states even if no item is cut."""
        keys = np.asarray(item_keys, dtype=np.float64)
        entries = np.asarray(item_entries, dtype=np.float64)
        per_state = num_kv_heads * self.per_state
        merge = 0 if merged else self.launch
        return TileRead(cost, keys, entries, num_kv_heads, per_state, merge, self.share_keys)

    @staticmethod
    def _device_time(cost: TileCost, num_packed: int, num_keys: int, start: bool = True) -> float:
        tiles = -(-num_packed // cost.tile.block_m)
        start_cost = cost.start if start else 0.0
        return tiles * (start_cost + num_keys * cost.per_key) / cost.programs


@dataclass(frozen=True, eq=False)
class TileRead:
    """Items of ``keys`` and ``entries``, read by units of one tile. A state of all KV heads costs
    ``per_state``; merging costs ``merge`` if items are cut. Shares of all programs have at least
    ``share_keys`` keys."""

    cost: TileCost
    keys: Counts
    entries: Counts
    num_kv_heads: int
    per_state: float
    merge: float
    share_keys: int

    def split(self) -> tuple[int, float]:
        """The best limit of keys a unit, if all units read about equally many, and the time."""
        total = float(self.keys.sum()) * self.num_kv_heads
        longest = float(self.keys.max(initial=0))
        best, best_time = _SPLITS[0], float("inf")
        for split in _SPLITS:
            parts = np.ceil(self.keys / split)
            units = float(parts.sum()) * self.num_kv_heads
            time = self.cost.makespan(units, min(split, longest), total)
            time += float(parts @ self.entries) * self.per_state
            if time < best_time:
                best, best_time = split, time
            if split >= longest:
                break
        return best, best_time + (self.merge if best < longest else 0.0)

    def shared(self, rounds: int, pieces: int, states: int) -> float:
        """Time if every program reads equally much, in at most ``rounds`` units each. ``pieces`` of
        items are not empty; their entries sum to ``states``. Infinite where measurements show a
        loss."""
        programs = self.cost.programs / self.num_kv_heads
        few_keys = float(self.keys.sum()) < self.share_keys * programs
        if few_keys or pieces > _MOST_PIECES * programs:
            return float("inf")
        busy = float(self.keys.sum()) * self.cost.per_key / programs
        return _FULL * busy + rounds * self.cost.start + states * self.per_state + self.merge


def default_cost_model(
    head_dim: int,
    itemsize: int,
    num_processors: int,
    *,
    hopper: bool = False,
    latent: bool = False,
) -> CostModel:
    """Costs measured on an H200 with heads of 128 in bf16, scaled to the shape: only their ratios
    matter for the choice of a plan. ``hopper`` assumes that generation's kernels; ``latent`` keys
    are the values."""
    if latent:
        return _latent_costs(head_dim, itemsize, num_processors)
    block_d = max(64, 1 << (head_dim - 1).bit_length())
    scale = block_d * itemsize / 256

    def cost(tile: Tile, start: float, per_key: float, alone: float) -> TileCost:
        programs = tile.programs_per_sm * num_processors
        return TileCost(tile, programs, start, per_key * scale, alone * scale)

    if hopper and _on_hopper(head_dim, itemsize):
        narrow, wide = Tile(64, 64, 4, 3, 2), Tile(128, 128, 8, 2, 1)
        narrow_cost = cost(narrow, start=2.0, per_key=0.0313, alone=0.0107)
        wide_cost = cost(wide, start=8.0, per_key=0.0135, alone=0.0121)
    else:
        if itemsize > 2:
            narrow, wide = Tile(16, 32, 4, 2, 2), Tile(32, 32, 4, 1, 1)
        elif block_d <= 128:
            narrow, wide = Tile(16, 8192 // block_d, 4, 2, 3), Tile(128, 64, 8, 3, 1)
        else:
            narrow, wide = Tile(16, 32, 4, 2, 3), Tile(64, 64, 8, 2, 1)
        narrow_cost = cost(narrow, start=2.0, per_key=0.049, alone=0.0143)
        wide_cost = cost(wide, start=8.0, per_key=0.03, alone=0.03)
    gather = None
    if hopper and _on_hopper(head_dim, 2):
        # another kernel reads e4m3 pages, except pages widened first
        paged = 0.02 if itemsize == 2 else 0.45
        # a list of a few thousand keys takes 0.25 ms for 32 layers
        listing = 8.0
        gather = GatherCost(3.0, 0.00027 * scale, listing, 1.6, paged, 2.8, paged + 0.1)
    # the largest number of units that can still be cut (docs/log.md)
    one_group = num_processors * 4 // 5 if hopper and _on_hopper(head_dim, itemsize) else 0
    return CostModel(
        narrow_cost, wide_cost, launch=4.0, per_state=0.00025, gather=gather, one_group=one_group
    )


def _latent_costs(head_dim: int, itemsize: int, num_processors: int) -> CostModel:
    """Costs from the bytes and products of keys of 576 dims in bf16, scaled to the shape."""
    scale = head_dim * itemsize / 1152
    if itemsize > 2:
        narrow, wide = Tile(16, 16, 4, 2, 1), Tile(32, 16, 8, 1, 1)
    else:
        # two buffers of keys: page numbers, which are loaded first, take two of the stages
        narrow, wide = Tile(16, 32, 4, 5, 2), Tile(64, 64, 8, 2, 1)
    programs = narrow.programs_per_sm * num_processors
    few = TileCost(narrow, programs, 3.0, 0.1 * scale, 0.035 * scale)
    # products bound the wide tile: e4m3 keys are widened
    many = TileCost(wide, num_processors, 8.0, 0.06 * head_dim / 576, 0.05 * head_dim / 576)
    return CostModel(few, many, launch=4.0, per_state=0.001)


def _on_hopper(head_dim: int, itemsize: int) -> bool:
    """Whether the Hopper kernels serve these pages; they have one tile of each kind."""
    return itemsize == 2 and head_dim in (64, 128)


def other_tiles(
    device: torch.device, tile: Tile, head_dim: int, itemsize: int, *, latent: bool = False
) -> list[Tile]:
    """Alternatives to ``tile`` that fit the GPU's shared memory."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major == 9 and _on_hopper(head_dim, itemsize):
        return []
    if latent:
        # more rows than a head group has: their products have faster instructions
        tiles = [*_LATENT_TILES] if itemsize == 2 else []
        return [other for other in tiles if other != tile and other.block_m >= tile.block_m]
    block_d = max(64, 1 << (head_dim - 1).bit_length())
    other = [
        replace(tile, block_n=block_n, num_stages=stages)
        for block_n in (tile.block_n // 2, tile.block_n, 2 * tile.block_n)
        for stages in (2, 3)
    ]
    room = _SHARED_BYTES // tile.programs_per_sm

    def fits(candidate: Tile) -> bool:
        tiles = candidate.block_m + 2 * candidate.num_stages * candidate.block_n
        return candidate.block_n >= 16 and tiles * block_d * itemsize <= room

    return [candidate for candidate in other if candidate != tile and fits(candidate)]


def cost_model_of(
    device: torch.device, head_dim: int, itemsize: int, *, latent: bool = False
) -> CostModel:
    """The default costs of a device; on a CPU, where kernels are only interpreted, any serve."""
    if device.type != "cuda":
        return default_cost_model(head_dim, itemsize, 132, latent=latent)
    properties = torch.cuda.get_device_properties(device)
    return default_cost_model(
        head_dim,
        itemsize,
        properties.multi_processor_count,
        hopper=properties.major == 9,
        latent=latent,
    )
