"""Seen-sets: shift registers of the rows in a window that have read a page.

One byte a page (and layer and KV head): before a step, bit ``j - 1`` marks a page read ``j`` steps
ago. A row of age ``i``, the query of ``i`` steps ago, has read a page if any of the last ``i``
steps did. The functions read no numbers back, so a graph can capture them."""

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor


def unseen(
    registers: UInt8[Tensor, "rows kv_heads chosen"], ages: Int[Tensor, " rows"]
) -> Bool[Tensor, "rows kv_heads chosen"]:
    """Mask of the pages with these registers that rows of these ages have not read, per KV head; a
    row of age 0 has read none. These are the paper's sets of unseen pages.
    """
    since = ((1 << ages) - 1).to(torch.uint8)
    return registers & since[:, None, None] == 0


def mark_read(
    registers: UInt8[Tensor, "outputs kv_heads pages"],
    read: Bool[Tensor, "outputs kv_heads pages"],
) -> UInt8[Tensor, "outputs kv_heads pages"]:
    """The registers after a step that reads ``read``; reads older than a byte are lost."""
    return (registers << 1) | read.to(torch.uint8)
