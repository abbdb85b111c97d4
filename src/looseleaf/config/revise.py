"""The revise policy of a request: which earlier rows attend to newly read keys (RetroAttention)."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import require_each, require_kinds

MAX_WINDOW = 9
"""The widest window: one byte per page records in which of the last eight steps it was read."""

Local = Literal["exact", "stale"]
"""The treatment of pages that are still written to. ``exact``: every row of the window reads them
again at every step. ``stale``, as RetroAttention states it literally: a row keeps the result of its
own step, computed with the earlier rows' keys and values of that step."""


@dataclass(frozen=True)
class Revise:
    """The rows of an output that are computed at every step (RetroAttention, arXiv 2508.09001).

    The newest row selects keys. The ``window - 1`` rows before it attend to the selected keys that
    they have not read yet; their keys and values are written again. A window of 1 revises nothing.
    With ``adaptive`` the window shrinks, down to 1, while a large batch makes more rows slow in the
    linear layers; answers then depend on the load of the engine. ``local`` "stale" is the published
    method, for comparisons: see `Local`. Raises InvalidOption for values out of range.
    """

    window: int = 2
    adaptive: bool = False
    local: Local = "exact"

    def __post_init__(self) -> None:
        require_kinds(self)
        require_each(self, f"from 1 to {MAX_WINDOW}", lambda w: 1 <= w <= MAX_WINDOW, "window")

    def __str__(self) -> str:
        stale = ", stale" if self.local == "stale" else ""
        return f"window {self.window}" + (", adaptive" if self.adaptive else "") + stale
