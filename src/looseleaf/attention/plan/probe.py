"""Times launches of the attention operators on a GPU, over random pages of its own."""

import statistics
from collections.abc import Callable

import numpy as np
import torch

from looseleaf.attention.plan.calibration import LONG, Shape
from looseleaf.attention.plan.groups import Entry, Item
from looseleaf.attention.plan.lists import FlatItems, Pieces, host_work, int32
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.partial_attention.work_list import Tile
from looseleaf.types import AttnState, Rotation, ScoreRule

_LAUNCHES, _REPETITIONS = 8, 5


class DeviceProbe:
    """Random pages on one device, in random order, read by launches in a captured graph.

    Every launch of a graph reads its own items, as far as the pages suffice: the cache holds no
    page of an earlier launch.
    """

    def __init__(self, device: torch.device, shape: Shape, max_items: int | None = None) -> None:
        self.device, self.shape = device, shape
        on_gpu = device.type == "cuda"
        # two rounds of two programs a processor
        units = 4 * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        items = max_items or 2 * units // shape.num_kv_heads
        self._num_pages = items * LONG // shape.page_size
        size = (
            1 if shape.latent else 2,
            self._num_pages,
            shape.num_kv_heads,
            shape.page_size,
            shape.head_dim,
        )
        pages = torch.empty(size, dtype=shape.dtype, device=device).normal_()
        self._pages = pages.to(shape.kv_dtype)
        angles = torch.zeros(LONG + 1, (shape.rotary_dim or shape.head_dim) // 2, device=device)
        self._rotation = Rotation(angles + 1, angles)
        self._rule = ScoreRule(shape.head_dim**-0.5)
        self._order = np.random.default_rng(0).permutation(self._num_pages)

    def attend(self, tile: Tile, rows: int, items: int, keys: int, readers: int) -> float:
        """See `looseleaf.attention.plan.calibration.Probe`."""
        shape, first = self.shape, 0
        lists = []
        for _ in range(_LAUNCHES):
            lists.append(self._list(tile, items, keys, rows, readers, first))
            first += -(-items // readers) * (keys // shape.page_size)
        size = (rows, shape.num_qo_heads, shape.head_dim)
        q = torch.randn(size, device=self.device).to(shape.dtype)
        k_pages, v_pages = self._pages[0], self._pages[-1]

        def launch() -> None:
            for work in lists:
                partial_attention(
                    q, k_pages, v_pages, work, self._rotation, self._rule, implementation="triton"
                )

        return self._microseconds(launch)

    def merge(self, rows: int, states: int) -> float:
        """See `looseleaf.attention.plan.calibration.Probe`."""
        size = (rows * states, self.shape.num_qo_heads, self.shape.head_dim)
        state = AttnState(
            torch.randn(size, device=self.device), torch.randn(size[:2], device=self.device)
        )
        indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * states
        out = torch.empty((rows, *size[1:]), dtype=self.shape.dtype, device=self.device)

        def launch() -> None:
            for _ in range(_LAUNCHES):
                merge_states(state, indptr, out=out, implementation="triton", indptr_ready=True)

        return self._microseconds(launch)

    def _list(
        self, tile: Tile, items: int, keys: int, rows: int, readers: int, first: int
    ) -> WorkList:
        """The list of one launch: ``items`` items, each read by all rows; ``readers`` consecutive
        items read the same pages."""
        count = keys // self.shape.page_size
        entries = [Entry(row, 0, keys) for row in range(rows)]
        work_items, pages = [], []
        for n in range(items):
            indices = (first + n // readers * count + np.arange(count)) % self._num_pages
            pages.append(int32(self._order[indices]))
            work_items.append(Item(range(count), 0, entries))
        flat = FlatItems.create(work_items, pages)
        positions = int32([keys - 1] * rows)
        classes = [(tile, items)]
        work = host_work(flat, Pieces.whole(flat), positions, self.shape.page_size, classes)
        return work.to(self.device)

    def _microseconds(self, launch: Callable[[], None]) -> float:
        """The median time of one of the launches in ``launch``."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        times = []
        for _ in range(_REPETITIONS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1e3 / _LAUNCHES)
        return statistics.median(times[1:])
