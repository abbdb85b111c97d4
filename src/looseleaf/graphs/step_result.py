"""The result of a step: logits, and the groups and selections by which its decode rows read."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.select.attend_pages import SelectedRows


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    ``logits`` ``[rows, vocab_size]`` are of its decode rows, then of chunks that end a prompt.
    ``groups`` are those of the decode rows in the first layer, the same object while the same rows
    go on; ``selected`` are the rows that choose what they read, by policy. ``launched`` is when the
    device first got something to do, on the clock `time.perf_counter`."""

    logits: Tensor
    groups: Groups
    selected: Rows[SelectedRows] = ()
    launched: float | None = None

    @classmethod
    def of_chunks(cls, logits: Tensor, launched: float | None = None) -> "StepResult":
        """The result of a step without decode rows."""
        return cls(logits, Groups([], []), (), launched)
