"""What attention costs on a device: which rows are worth grouping, and how far items are cut.

Times are of one KV head and one layer. A launch keeps a fixed number of programs in flight; a unit
(item, KV head) takes ``start`` and ``per_key`` for every key while all of them are busy, and
``per_key_alone`` while few are.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.ops.partial_attention.work_list import Tile

_SPLITS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# what a key takes where all programs read to the end, of what it takes where some end sooner
_FULL = 0.97
# pieces of a share in the mean: more lost 2 to 8 %, each being begun (docs/log.md)
_MOST_PIECES = 3
# of a multiprocessor, less what its programs keep for themselves
_SHARED_BYTES = 200 * 1024
Counts = npt.NDArray[Any]


@dataclass(frozen=True)
class TileCost:
    """What units of one tile cost, in microseconds, with ``programs`` of them in flight."""

    tile: Tile
    programs: int
    start: float
    per_key: float
    per_key_alone: float

    def makespan(self, units: float, keys_per_unit: float, total_keys: float) -> float:
        """How long a launch of ``units`` takes that read ``total_keys`` in all, none more than
        ``keys_per_unit``."""
        whole_rounds, rest = divmod(units, self.programs)
        busy = total_keys * self.per_key / self.programs
        if not rest:
            return busy + whole_rounds * self.start
        # programs of the last round share the memory with fewer others
        last = keys_per_unit * max(self.per_key_alone, self.per_key * rest / self.programs)
        shared = keys_per_unit * self.per_key * rest / self.programs
        return busy - min(busy, shared) + last + (whole_rounds + 1) * self.start


@dataclass(frozen=True)
class GatherCost:
    """What gathering keys before they are read by spans costs a layer, in microseconds: ``launch``,
    ``per_key`` of a KV head, and of ``listing``, for which the host works once a step before the
    device begins; and what is won by it: ``border`` where a unit would go on from one
    span to the next, and the share ``paged`` of the time in which keys are read (tiles come in one
    copy); where some keys are replaced, ``masked_border`` and ``masked`` instead."""

    launch: float
    per_key: float
    listing: float
    border: float
    paged: float
    masked_border: float
    masked: float


@dataclass(frozen=True)
class ReadBySpans:
    """What new rows read: ``units`` (tiles and KV heads) that read ``unit_keys`` keys and cross
    ``unit_borders`` borders of spans each, in the mean, of ``keys`` in all; whether some of these
    are replaced."""

    units: int
    unit_keys: float
    unit_borders: float
    keys: int
    masked: bool


@dataclass(frozen=True)
class CostModel:
    """``narrow`` reads for one row or few, ``wide`` for many. ``launch`` is what one more kernel
    costs, ``per_state`` what the merge takes for a state of one row and KV head; ``gather`` None
    where keys are read in place. Rows that read around replaced tokens do so soonest by programs of
    one computing group where units are ``one_group`` at most."""

    narrow: TileCost
    wide: TileCost
    launch: float
    per_state: float
    gather: GatherCost | None = None
    one_group: int = 0
    share_keys: int = 1024

    def worth_gathering(self, read: ReadBySpans, num_kv_heads: int) -> bool:
        """Whether keys had better be gathered before rows read them."""
        cost = self.gather
        if cost is None or self.groups_for(read) == 1:
            return False
        # few units are cut in parts, which are in flight at a time
        rounds = read.units / self.wide.programs
        border, share = cost.border, cost.paged
        if read.masked:
            border, share = cost.masked_border, cost.masked
        won = rounds * (share * read.unit_keys * self.wide.per_key + border * read.unit_borders)
        return won > cost.launch + cost.listing + cost.per_key * read.keys * num_kv_heads

    def groups_for(self, read: ReadBySpans) -> int:
        """How many computing groups the programs have that read this: two, which share the tiles
        of keys, or one. There are twice as many of those at a time, and at a border they wait for
        nobody; so it pays to cut what few rows read for them."""
        return 1 if read.masked and read.units <= self.one_group else 2

    def wide_gain(self, num_packed: int, num_keys: int) -> float:
        """What the wide tile saves over narrow ones, for rows that read the same keys."""
        return self._device_time(self.narrow, num_packed, num_keys) - self._device_time(
            self.wide, num_packed, num_keys
        )

    def worth_sharing(self, num_rows: int, group: int, num_keys: int) -> bool:
        """Whether rows had better read these keys together than each on its own."""
        alone = num_rows * self._device_time(self.narrow, group, num_keys, start=False)
        packed = num_rows * group
        together = min(
            self._device_time(tile, packed, num_keys) for tile in (self.narrow, self.wide)
        )
        # each row's state of the shared keys must be merged with that of the others
        return together + num_rows * self.per_state < alone

    def reading(
        self,
        cost: TileCost,
        item_keys: Counts,
        item_entries: Counts,
        num_kv_heads: int,
        *,
        merged: bool = True,
    ) -> "Reading":
        """Ways to read items of these keys and entries with one tile; ``merged``: their rows have
        several states even if no item is cut."""
        keys = np.asarray(item_keys, dtype=np.float64)
        entries = np.asarray(item_entries, dtype=np.float64)
        per_state = num_kv_heads * self.per_state
        merge = 0 if merged else self.launch
        return Reading(cost, keys, entries, num_kv_heads, per_state, merge, self.share_keys)

    @staticmethod
    def _device_time(cost: TileCost, num_packed: int, num_keys: int, start: bool = True) -> float:
        tiles = -(-num_packed // cost.tile.block_m)
        begun = cost.start if start else 0.0
        return tiles * (begun + num_keys * cost.per_key) / cost.programs


@dataclass(frozen=True, eq=False)
class Reading:
    """Items of so many ``keys`` and ``entries``, as units of one tile read them. A state of all KV
    heads costs ``per_state``, and to merge states at all ``merge`` if items are cut; shares of all
    programs have ``share_keys`` at least."""

    cost: TileCost
    keys: Counts
    entries: Counts
    num_kv_heads: int
    per_state: float
    merge: float
    share_keys: int

    def split(self) -> tuple[int, float]:
        """How many keys a unit should read at most if all are to read about as many, and how long
        they take then."""
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

    def shared(self, turns: int, pieces: int, states: int) -> float:
        """How long they take if every program reads equally much, in so many ``turns`` at most,
        of which ``pieces`` of items read something, whose entries are ``states``; forever where
        that was seen to lose."""
        programs = self.cost.programs / self.num_kv_heads
        few_keys = float(self.keys.sum()) < self.share_keys * programs
        if few_keys or pieces > _MOST_PIECES * programs:
            return float("inf")
        busy = float(self.keys.sum()) * self.cost.per_key / programs
        return _FULL * busy + turns * self.cost.start + states * self.per_state + self.merge


def default_cost_model(
    head_dim: int, itemsize: int, num_processors: int, *, hopper: bool = False
) -> CostModel:
    """Costs as measured on an H200 with heads of 128 in bf16, scaled to the shape: for the choice
    between plans only their ratios matter. ``hopper``: with the kernels of that generation."""
    block_d = max(64, 1 << (head_dim - 1).bit_length())
    scale = block_d * itemsize / 256
    if hopper and _on_hopper(head_dim, itemsize):
        narrow, wide = Tile(64, 64, 4, 3, 2), Tile(128, 128, 8, 2, 1)
        narrow_costs, wide_costs = (2.0, 0.0313, 0.0107), (8.0, 0.0135, 0.0121)
    else:
        if itemsize > 2:
            narrow, wide = Tile(16, 32, 4, 2, 2), Tile(32, 32, 4, 1, 1)
        elif block_d <= 128:
            narrow, wide = Tile(16, 8192 // block_d, 4, 2, 3), Tile(128, 64, 8, 3, 1)
        else:
            narrow, wide = Tile(16, 32, 4, 2, 3), Tile(64, 64, 8, 2, 1)
        narrow_costs, wide_costs = (2.0, 0.049, 0.0143), (8.0, 0.03, 0.03)

    def cost(tile: Tile, start: float, per_key: float, alone: float) -> TileCost:
        programs = tile.programs_per_sm * num_processors
        return TileCost(tile, programs, start, per_key * scale, alone * scale)

    gather = None
    if hopper and _on_hopper(head_dim, 2):
        # pages of e4m3 are left to another kernel, but for those that are widened first
        paged = 0.02 if itemsize == 2 else 0.45
        # lists of a few thousand keys take 0.25 ms, of 32 layers
        listing = 8.0
        gather = GatherCost(3.0, 0.00027 * scale, listing, 1.6, paged, 2.8, paged + 0.1)
    tiles = cost(narrow, *narrow_costs), cost(wide, *wide_costs)
    # as many units as can still be cut (docs/log.md)
    one_group = num_processors * 4 // 5 if hopper and _on_hopper(head_dim, itemsize) else 0
    return CostModel(*tiles, 4.0, 0.00025, gather, one_group)


def _on_hopper(head_dim: int, itemsize: int) -> bool:
    """Whether the kernels of that generation serve such pages: they have one tile of each kind."""
    return itemsize == 2 and head_dim in (64, 128)


def other_tiles(device: torch.device, tile: Tile, head_dim: int, itemsize: int) -> list[Tile]:
    """What else could read the rows of ``tile`` on a GPU, and fits its shared memory."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major == 9 and _on_hopper(head_dim, itemsize):
        return []
    block_d = max(64, 1 << (head_dim - 1).bit_length())
    other = [
        replace(tile, block_n=block_n, num_stages=stages)
        for block_n in (tile.block_n // 2, tile.block_n, 2 * tile.block_n)
        for stages in (2, 3)
    ]
    room = _SHARED_BYTES // tile.programs_per_sm

    def fits(one: Tile) -> bool:
        tiles = one.block_m + 2 * one.num_stages * one.block_n
        return one.block_n >= 16 and tiles * block_d * itemsize <= room

    return [one for one in other if one != tile and fits(one)]


def cost_model_of(device: torch.device, head_dim: int, itemsize: int) -> CostModel:
    """The default costs for a device; for a CPU, where kernels are only interpreted, any will
    do."""
    if device.type != "cuda":
        return default_cost_model(head_dim, itemsize, 132)
    properties = torch.cuda.get_device_properties(device)
    return default_cost_model(
        head_dim, itemsize, properties.multi_processor_count, hopper=properties.major == 9
    )
