"""RetroAttention: past rows of an output are recomputed and read the newest row's pages.

`window` has the rows of a step and their final pages, `seen` the pages that each row has read,
`states` the cached outputs. `policy` combines them with a page-choosing policy. `exposure` measures
the gain over a budget, `adaptive` limits the window of a batch. README.md has the equation."""

from looseleaf.retro.adaptive import free_rows, window_for
from looseleaf.retro.exposure import Exposure, exposure_ratios
from looseleaf.retro.policy import Revising
from looseleaf.retro.seen import mark_read, unseen
from looseleaf.retro.states import RevisionStates, StateShape
from looseleaf.retro.window import Window

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
