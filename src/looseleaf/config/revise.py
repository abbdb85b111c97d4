"""The revise policy of a request: which earlier rows profit from what is read now."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import require_each, require_kinds

MAX_WINDOW = 9
"""The widest window: one byte says in which of the eight steps before this one a page was read."""

Local = Literal["exact", "stale"]
"""What becomes of pages that are still written to: every row of the window reads them anew at every
step; or, as RetroAttention says literally, a row keeps what it read of them at its own step, with
the keys and values that earlier rows had then."""


@dataclass(frozen=True)
class Revise:
    """How many rows of an output are computed at every step (RetroAttention).

    The newest row chooses what is read; the ``window - 1`` rows before it attend to what of that
    they have not read yet, and their keys and values are written anew. A window of 1 revises
    nothing. With ``adaptive`` the window falls, down to 1, when the batch is so large that more
    rows would cost time in the linear layers: then an answer depends on what else the engine does.
    ``local`` "stale" is the method to the letter, to be compared with: see `Local`. Raises
    InvalidOption.
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
