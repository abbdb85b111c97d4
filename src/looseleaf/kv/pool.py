"""The page pool: one tensor of fixed-size slots for keys and values, and which of them are taken.

A page has one owner, a segment of the `SegmentStore` or a sequence's running tail; sharing is
counted by the store, in references to segments. The pool knows neither, only which pages are free.
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

# pages left free behind a run that may still grow
_ROOM = 8
LayerPages = tuple[
    Float[Tensor, "pages kv_heads page_size head_dim"],
    Float[Tensor, "pages kv_heads page_size head_dim"],
]


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, each with K and V of every layer.

    Pages start zeroed and only finite numbers are written, so a slot beyond a segment's end can be
    read and discarded. ``generations`` counts how often each page was handed out. On a GPU a page
    is one stretch of memory; on the CPU all pages of a KV head are, so that a run of neighbouring
    pages is read without a copy. ``slot_positions`` says where the keys of a patch stand; it means
    nothing for other pages. Raises InvalidOption for a pool without pages.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_pages < 1:
            raise InvalidOption("the pool needs at least one page: give the cache more memory")
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv: Float[Tensor, "layers 2 pages kv_heads page_size head_dim"]
        if device.type == "cpu":
            shape = (num_layers, 2, num_kv_heads, num_pages, page_size, head_dim)
            self.kv = _lazy_zeros(shape, dtype).transpose(2, 3)
        else:
            shape = (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.slot_positions: Int[Tensor, "pages page_size"] = torch.full(
            (num_pages, page_size), -1, dtype=torch.int32, device=device
        )
        # of K and V of all layers in one page
        self.bytes_per_page = self.kv[:, :, 0].numel() * self.kv.element_size()
        self._layers = [(self.kv[layer, 0], self.kv[layer, 1]) for layer in range(num_layers)]
        # how often a page was handed out: what is kept of a page is of one such life of it
        self.generations = np.zeros(num_pages, dtype=np.int64)
        # which pages are free, twice: the same memory
        self._free_bytes = bytearray(b"\1" * num_pages)
        self._is_free = np.frombuffer(self._free_bytes, dtype=np.bool_)
        self._num_free = num_pages
        # how many were given back so far
        self.num_freed = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    def layer(self, layer: int) -> LayerPages:
        """K pages and V pages of one layer, views of the pool."""
        return self._layers[layer]

    def let_go(self) -> None:
        """Give the memory of all pages back, whoever still holds the pool; none may be read after.
        On a CPU it goes with the pool."""
        if self.kv.is_cuda:
            self.kv.untyped_storage().resize_(0)

    def place(self, pages: Sequence[int], positions: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Say where the keys in ``pages`` stand, slot by slot; the slots behind them hold none."""
        flat = np.full(len(pages) * self.page_size, -1, dtype=np.int32)
        flat[: len(positions)] = positions
        there = torch.from_numpy(flat.reshape(len(pages), self.page_size))
        on_gpu, first = self.slot_positions.is_cuda, pages[0] if pages else 0
        if on_gpu:
            there = there.pin_memory()
        if list(pages) == list(range(first, first + len(pages))):
            # neighbours, as most patches are: one copy, which waits for nothing that the device
            # still has to do
            self.slot_positions[first : first + len(pages)].copy_(there, non_blocking=True)
            return
        numbers = torch.tensor(pages, dtype=torch.int64)
        if on_gpu:
            device = self.slot_positions.device
            numbers = numbers.pin_memory().to(device, non_blocking=True)
            there = there.to(device, non_blocking=True)
        self.slot_positions[numbers] = there

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) if so many are not free.

        Neighbours if possible, as low as possible: what is allocated is read as one run, and memory
        that was in use before is used again. A few pages are left free behind what stands before,
        for it to grow into.
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
        """One page, the neighbour behind ``page`` if it is free; None if no page is."""
        behind = page + 1
        if behind == self.num_pages or not self._is_free[behind]:
            return self.allocate(1)
        self._is_free[behind] = False
        self.generations[behind] += 1
        self._num_free -= 1
        return [behind]

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises IntegrityError for a page that is free already."""
        for page in pages:
            if self._is_free[page]:
                raise IntegrityError(f"page {page} was freed twice")
            self._is_free[page] = True
            self._num_free += 1
            self.num_freed += 1

    def check(self, owned: Iterable[int]) -> None:
        """Raise IntegrityError unless ``owned``, each page once, and the free ones are the pool."""
        books = Counter(owned)
        books.update(np.flatnonzero(self._is_free).tolist())
        twice = sorted(page for page, count in books.items() if count > 1)
        if twice:
            raise IntegrityError(f"pages with two owners, or free and owned: {twice[:8]}")
        lost = sorted(set(range(self.num_pages)) - set(books))
        if lost:
            raise IntegrityError(f"{len(lost)} pages lost, among them {lost[:8]}")
        if self._num_free != int(self._is_free.sum()):
            raise IntegrityError("the count of free pages is wrong")

    def _take(self, pages: range | npt.NDArray[np.intp]) -> list[int]:
        where = slice(pages.start, pages.stop) if isinstance(pages, range) else pages
        self._is_free[where] = False
        self.generations[where] += 1
        self._num_free -= len(pages)
        return list(pages) if isinstance(pages, range) else pages.tolist()

    def _run_of(self, count: int) -> int | None:
        """Where ``count`` free neighbours begin, None if there are none."""
        # searched as bytes: one call, where numpy needs ten
        wanted, wider = b"\1" * count, b"\1" * (count + _ROOM)
        if self._free_bytes.startswith(wanted):
            return 0
        if (start := self._free_bytes.find(wider)) >= 0:
            return start + _ROOM
        start = self._free_bytes.find(wanted)
        return start if start >= 0 else None


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that cost memory only once they are written. Raises InvalidOption for more of them than
    the machine grants."""
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
