"""RetroAttention: past rows of an output are recomputed and read the newest row's pages.

`window` has the rows of a step, their final pages and the limit of an adaptive window, `seen` the
pages that each row has read and the gain over a budget, `states` the cached outputs. `policy`
combines them with a page-choosing policy. README.md has the equation."""

from looseleaf.retro.policy import Revising
from looseleaf.retro.seen import Exposure, exposure_ratios, mark_read, unseen
from looseleaf.retro.states import RevisionStates, StateShape
from looseleaf.retro.window import Window, free_rows, window_for

__all__ = [
    "Exposure",
    "Revising",
    "RevisionStates",
    "StateShape",
    "Window",
    "exposure_ratios",
    "free_rows",
    "mark_read",
    "unseen",
    "window_for",
]
