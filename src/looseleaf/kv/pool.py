"""The page pool: one tensor of fixed-size slots for keys and values, and which of them are taken.

A page has one owner, a segment of the `SegmentStore` or a sequence's running tail; sharing is
counted by the store, in references to segments. The pool knows neither, only which pages are free.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import IntegrityError, InvalidOption


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, each with K and V of every layer.

    Pages start zeroed and only finite numbers are written, so a slot beyond a segment's end can be
    read and discarded. Raises InvalidOption for a pool without pages."""

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
            raise InvalidOption("the page pool needs at least one page: give the cache more memory")
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv: Float[Tensor, "layers 2 pages kv_heads page_size head_dim"] = torch.zeros(
            (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device=device,
        )
        self._layers = [(self.kv[layer, 0], self.kv[layer, 1]) for layer in range(num_layers)]
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of K and V of all layers in one page."""
        return self.kv[:, :, 0].numel() * self.kv.element_size()

    def layer(
        self, layer: int
    ) -> tuple[
        Float[Tensor, "pages kv_heads page_size head_dim"],
        Float[Tensor, "pages kv_heads page_size head_dim"],
    ]:
        """K pages and V pages of one layer, views of the pool."""
        return self._layers[layer]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) if so many are not free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises IntegrityError for a page that is free already."""
        # backwards, so that a run that is freed and taken again stays a run
        for page in reversed(list(pages)):
            if not self._taken[page]:
                raise IntegrityError(f"page {page} was freed twice")
            self._taken[page] = 0
            self._free.append(page)

    def check(self, owned: Iterable[int]) -> None:
        """Raise IntegrityError unless ``owned``, each page once, and the free list are the whole
        pool.
        """
        books = Counter(owned)
        books.update(self._free)
        twice = sorted(page for page, count in books.items() if count > 1)
        if twice:
            raise IntegrityError(f"pages with two owners, or free and owned: {twice[:8]}")
        lost = sorted(set(range(self.num_pages)) - set(books))
        if lost:
            raise IntegrityError(f"{len(lost)} pages lost, among them {lost[:8]}")
        wrong = [page for page in self._free if self._taken[page]]
        if wrong:
            raise IntegrityError(f"pages free and marked as taken: {wrong[:8]}")
