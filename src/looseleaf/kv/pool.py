"""The page pool: one tensor of fixed-size pages for keys and values, and the set of free pages.

A page has one owner: a segment of the `SegmentStore`, or the tail of a running sequence. The store
counts references to segments; the pool tracks only free pages.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import IntegrityError, InvalidOption

# free pages reserved for the growth of the run before them
_ROOM = 8
LayerPages = tuple[
    Float[Tensor, "pages kv_heads page_size head_dim"],
    Float[Tensor, "pages kv_heads page_size head_dim"],
]


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, each with K and V of ``num_layers`` layers.

    ``kv_layers`` are the layers whose K and V each layer of the model reads: its own, until
    `share_layers` adds layers that store none.

    With one of ``planes``, the values are the keys, and K and V are the same memory.

    Pages are zero-initialised and only finite numbers are written, so kernels may read slots beyond
    a segment's end and discard them. ``generations`` counts the allocations of each page. On a GPU
    a page is contiguous; on a CPU all pages of a KV head are, so that adjacent pages are read
    without a copy. ``slot_positions`` are the positions of a patch's keys; it is undefined for
    other pages. Raises InvalidOption for a pool without pages.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        planes: int = 2,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1:
            raise InvalidOption("the pool needs at least one page: give the cache more memory")
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv: Float[Tensor, "layers planes pages kv_heads page_size head_dim"]
        if device.type == "cpu":
            shape = (num_layers, planes, num_kv_heads, num_pages, page_size, head_dim)
            self.kv = _lazy_zeros(shape, dtype).transpose(2, 3)
        else:
            shape = (num_layers, planes, num_pages, num_kv_heads, page_size, head_dim)
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.slot_positions: Int[Tensor, "pages page_size"] = torch.full(
            (num_pages, page_size), -1, dtype=torch.int32, device=device
        )
        # K and V of all layers
        self.bytes_per_page = self.kv[:, :, 0].numel() * self.kv.element_size()
        self.kv_layers: Sequence[int] = range(num_layers)
        self._layers = [(self.kv[layer, 0], self.kv[layer, -1]) for layer in range(num_layers)]
        # allocations of each page: data derived from a page is valid for one generation
        self.generations = np.zeros(num_pages, dtype=np.int64)
        # two views of the same memory
        self._free_bytes = bytearray(b"\1" * num_pages)
        self._is_free = np.frombuffer(self._free_bytes, dtype=np.bool_)
        self._num_free = num_pages
        # pages freed since the pool was created
        self.num_freed = 0

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return self._num_free

    def share_layers(self, kv_layers: Sequence[int]) -> None:
        """Let each layer of the model read the K and V of the stored layer ``kv_layers[layer]``."""
        self._layers = [self._layers[layer] for layer in kv_layers]
        self.kv_layers = kv_layers

    def layer(self, layer: int) -> LayerPages:
        """The K pages and V pages that one layer of the model reads, views of the pool."""
        return self._layers[layer]

    def release_memory(self) -> None:
        """Free the device memory of all pages, even if the pool is still referenced.

        Pages must not be read afterwards. On a CPU the memory is freed with the pool."""
        if self.kv.is_cuda:
            self.kv.untyped_storage().resize_(0)

    def set_positions(
        self, pages: Sequence[int], positions: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        """Set the positions of the keys in ``pages``, slot by slot; further slots become -1."""
        flat = np.full(len(pages) * self.page_size, -1, dtype=np.int32)
        flat[: len(positions)] = positions
        slots = torch.from_numpy(flat.reshape(len(pages), self.page_size))
        on_gpu, first = self.slot_positions.is_cuda, pages[0] if pages else 0
        if on_gpu:
            slots = slots.pin_memory()
        if list(pages) == list(range(first, first + len(pages))):
            # most patches are adjacent pages: one asynchronous copy
            self.slot_positions[first : first + len(pages)].copy_(slots, non_blocking=True)
            return
        numbers = torch.tensor(pages, dtype=torch.int64)
        if on_gpu:
            device = self.slot_positions.device
            numbers = numbers.pin_memory().to(device, non_blocking=True)
            slots = slots.to(device, non_blocking=True)
        self.slot_positions[numbers] = slots

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages; None, without an allocation, if fewer are free.

        The pages are adjacent if possible, because kernels read adjacent pages as one run. Low page
        numbers come first, so that memory is reused. A few pages after the preceding run stay free
        for its growth.
        """
        if count > self._num_free:
            return None
        if count == 0:
            return []
        start = self._run_of(count)
        if start is None:
            return self._take(np.flatnonzero(self._is_free)[:count])
        return self._take(range(start, start + count))

    def allocate_next(self, page: int) -> list[int] | None:
        """One page, preferably the one after ``page``; None if no page is free."""
        following = page + 1
        if following == self.num_pages or not self._is_free[following]:
            return self.allocate(1)
        return self._take(range(following, following + 1))

    def free(self, pages: Iterable[int]) -> None:
        """Free pages. Raises IntegrityError for a page that is free already."""
        for page in pages:
            if self._is_free[page]:
                raise IntegrityError(f"page {page} was freed twice")
            self._is_free[page] = True
            self._num_free += 1
            self.num_freed += 1

    def check(self, owned: Iterable[int]) -> None:
        """Raise IntegrityError unless every page is either free or exactly once in ``owned``."""
        uses = Counter(owned)
        uses.update(np.flatnonzero(self._is_free).tolist())
        duplicates = sorted(page for page, count in uses.items() if count > 1)
        if duplicates:
            raise IntegrityError(f"pages with two owners, or free and owned: {duplicates[:8]}")
        lost = sorted(set(range(self.num_pages)) - set(uses))
        if lost:
            raise IntegrityError(f"{len(lost)} pages lost, among them {lost[:8]}")
        if self._num_free != int(self._is_free.sum()):
            raise IntegrityError("the count of free pages is wrong")

    def _take(self, pages: range | npt.NDArray[np.intp]) -> list[int]:
        index = slice(pages.start, pages.stop) if isinstance(pages, range) else pages
        self._is_free[index] = False
        self.generations[index] += 1
        self._num_free -= len(pages)
        return list(pages) if isinstance(pages, range) else pages.tolist()

    def _run_of(self, count: int) -> int | None:
        """The first page of ``count`` adjacent free pages, or None."""
        # bytes.find is one call; numpy needs ten
        run, run_with_room = b"\1" * count, b"\1" * (count + _ROOM)
        if self._free_bytes.startswith(run):
            return 0
        if (start := self._free_bytes.find(run_with_room)) >= 0:
            return start + _ROOM
        start = self._free_bytes.find(run)
        return start if start >= 0 else None


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory is committed on first write. Raises InvalidOption beyond the machine's
    memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        raw = np.zeros(num_bytes, dtype=np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:
        raise InvalidOption(
            f"the pool would take {num_bytes / 2**30:,.0f} GiB, more than this machine gives: "
            "lower memory_gib or num_pages",
            "memory_gib",
            "num_pages",
        ) from error
    return torch.from_numpy(raw).view(dtype).view(shape)
