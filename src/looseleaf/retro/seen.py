"""Seen-sets: which of the rows in a window has read which page, as shift registers.

One byte a page (and layer and KV head): before a step, bit ``j - 1`` says that the page was read
``j`` steps ago. A row of age ``i``, the query of ``i`` steps ago, has read a page since it was made
if any of the last ``i`` steps did. Plain tensor functions that look at no number, so that they can
be captured in a graph."""

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor


def unseen(
    registers: UInt8[Tensor, "rows kv_heads chosen"], ages: Int[Tensor, " rows"]
) -> Bool[Tensor, "rows kv_heads chosen"]:
    """Which pages are new to rows of these ages, of pages with these registers; to a row of age 0
    all are. The sets of RetroAttention, of pages that a row has not seen, per KV head.
    """
    since = ((1 << ages) - 1).to(torch.uint8)
    return registers & since[:, None, None] == 0


def mark_read(
    registers: UInt8[Tensor, "outputs kv_heads pages"],
    read: Bool[Tensor, "outputs kv_heads pages"],
) -> UInt8[Tensor, "outputs kv_heads pages"]:
    """The registers after a step that read these pages; what is older than a byte is lost."""
    return (registers << 1) | read.to(torch.uint8)
