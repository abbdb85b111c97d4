"""What one sequence was promised of its tiers, and what it got: loads, predictions, a ratio."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from looseleaf.engine.reports.outputs import LoadingReport
from looseleaf.tiers import Load


@dataclass(eq=False)
class Arrivals:
    """The loads of a sequence with the controller's predictions, in seconds; None where nothing was
    known. ``ratio`` is the controller's, if it was asked for one."""

    loads: list[Load] = field(default_factory=list)
    load_predicted: float | None = None
    total_predicted: float | None = None
    ratio: float | None = None

    def report(self, total_seconds: float | None) -> LoadingReport | None:
        """All of it for the caller; ``total_seconds`` is from admission to the first token. What
        failed to come is left out; None where nothing else was to come, and no ratio chosen."""
        loads = [load for load in self.loads if load.state in ("loading", "done")]
        if self.loads and not loads and self.ratio is None:
            return None
        return LoadingReport(
            tiers=tuple(dict.fromkeys(load.tier for load in loads)),
            num_bytes=sum(load.record.num_bytes for load in loads),
            load_predicted=self.load_predicted,
            load_seconds=_longest([load.seconds for load in loads]),
            total_predicted=self.total_predicted,
            total_seconds=total_seconds,
            ratio=self.ratio,
        )


def _longest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None
