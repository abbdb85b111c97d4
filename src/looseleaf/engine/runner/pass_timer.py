"""The timer of one step with new rows, which adds its time to the model's compute time."""

import torch

from looseleaf.blend.fusion import Fusion
from looseleaf.engine.runner.step import Step
from looseleaf.engine.tiering.compute_time import ComputeTime, count_read, passes_over
from looseleaf.graphs.layerwise import LayerwiseWait

# least share of rows that blending passes need for their time to be known
_MOSTLY = 0.9


class PassTimer:
    """Times one step, from construction to `end`, for ``compute_time``."""

    def __init__(self, compute_time: ComputeTime, device: torch.device) -> None:
        self._compute_time = compute_time
        self._begun = compute_time.begin(device)

    def end(self, step: Step, layerwise: LayerwiseWait | None) -> None:
        """Observe the launched step, without the time that its layers waited for documents."""
        blended = [c.stop - c.start for c in step.work.chunks if isinstance(c.target, Fusion)]
        # the time of a blending pass is unknown when other rows share its step
        if blended and sum(blended) <= _MOSTLY * step.rows.num_rows:
            return
        if layerwise is not None and isinstance(self._begun, float):
            self._begun += layerwise.waited
        waits = () if layerwise is None else layerwise.waits
        blends = passes_over(step.chunks)
        self._compute_time.end(
            self._begun, step.rows.num_rows, _pairs(step), blends=blends, waits=waits
        )

    def end_replay(self, step: Step) -> None:
        """Observe a step that was launched as a graph."""
        blends = passes_over(step.chunks)
        self._compute_time.end(self._begun, step.rows.num_rows, _pairs(step), blends=blends)


def _pairs(step: Step) -> int:
    own = sum(row.position + 1 for row in step.decode)
    return own + sum(map(count_read, step.chunks))
