"""The report on the loads of one sequence: predicted times, measured times, recompute ratio."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from looseleaf.engine.reports.outputs import LoadingReport
from looseleaf.tiers import Load


@dataclass(eq=False)
class Arrivals:
    """The loads of a sequence, and the load controller's predictions in seconds.

    A prediction is None without measurements. ``ratio`` is the recompute ratio that the controller
    chose, None without this choice."""

    loads: list[Load] = field(default_factory=list)
    load_predicted: float | None = None
    total_predicted: float | None = None
    ratio: float | None = None

    def report(self, total_seconds: float | None) -> LoadingReport | None:
        """The report for the caller, without failed loads.

        ``total_seconds`` is the time from admission to the first token. Returns None if all loads
        failed and the controller chose no ratio."""
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
