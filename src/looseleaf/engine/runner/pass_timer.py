"""The measurement of one step with new rows: its launch is timed, and the pace hears of it."""

import torch

from looseleaf.blend.fusion import Fusion
from looseleaf.engine.runner.step import Step
from looseleaf.engine.tiering.compute_time import ComputePace, count_read, passes_over
from looseleaf.graphs.layerwise import Following

# the share of rows that passes must have for their time to be known
_MOSTLY = 0.9


class PassTimer:
    """Times a step from its making on, and reports it to ``pace``."""

    def __init__(self, pace: ComputePace, device: torch.device) -> None:
        self._pace = pace
        self._begun = pace.begin(device)

    def end(self, step: Step, following: Following | None) -> None:
        """The step is launched; less the time that its layers waited for documents."""
        blended = [c.stop - c.start for c in step.work.chunks if isinstance(c.target, Fusion)]
        # of a pass beside much else nobody knows how long it took
        if blended and sum(blended) <= _MOSTLY * step.rows.num_rows:
            return
        if following is not None and isinstance(self._begun, float):
            self._begun += following.waited
        waits = () if following is None else following.waits
        blends = passes_over(step.chunks)
        self._pace.end(self._begun, step.rows.num_rows, _pairs(step), blends=blends, waits=waits)

    def end_replay(self, step: Step) -> None:
        """The step is launched as a graph."""
        blends = passes_over(step.chunks)
        self._pace.end(self._begun, step.rows.num_rows, _pairs(step), blends=blends)


def _pairs(step: Step) -> int:
    own = sum(row.position + 1 for row in step.decode)
    return own + sum(map(count_read, step.chunks))
