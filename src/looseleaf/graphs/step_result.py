"""The result of a step: logits, and the groups and selections by which its decode rows read."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.select.attend_pages import SelectedRows


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    ``logits`` ``[rows, vocab_size]`` belong to its decode rows, then to chunks that end a prompt.
    ``groups`` are the groups of decode rows in the first layer; consecutive steps of the same rows
    share the object. ``selected`` are the rows that select pages, by policy. ``launched`` is the
    time of the first launch, on the clock `time.perf_counter`."""

    logits: Tensor
    groups: Groups
    selected: Rows[SelectedRows] = ()
    launched: float | None = None

    @classmethod
    def of_chunks(cls, logits: Tensor, launched: float | None = None) -> "StepResult":
        """The result of a step without decode rows."""
        return cls(logits, Groups([], []), (), launched)
