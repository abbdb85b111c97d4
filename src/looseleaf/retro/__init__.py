"""Which earlier rows profit from what is read now (RetroAttention).

`window` says which rows a step has and which pages are final for them, `seen` which row has read
which page, `states` what is kept between steps, `policy` puts them together beside a policy that
chooses pages. `exposure` says how much that adds to a budget, `adaptive` how wide a window a batch
can bear."""

from looseleaf.retro.adaptive import free_rows, window_for
from looseleaf.retro.exposure import Exposure, exposure_ratios
from looseleaf.retro.policy import RevisedRow, Revising
from looseleaf.retro.seen import mark_read, unseen
from looseleaf.retro.states import RevisionStates, StateShape
from looseleaf.retro.window import Window

__all__ = [
    "Exposure",
    "RevisedRow",
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
