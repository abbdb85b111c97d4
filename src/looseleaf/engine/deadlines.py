"""Deadlines: a heap of the times at which requests must have ended."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from looseleaf.engine.progress import RequestProgress
from looseleaf.errors import DeadlineExceeded


def deadline_error(progress: RequestProgress) -> DeadlineExceeded:
    """The error of a request whose deadline has passed."""
    return DeadlineExceeded(
        f"the request did not end within its deadline of {progress.request.deadline} s: "
        "allow more time or ask for fewer tokens"
    )


class Deadlines:
    """Request ids by deadline, on the clock `time.perf_counter`.

    ``entries`` is a heap of deadlines and ids, so a request that has ended is not kept in memory.
    Ids of ended requests are dropped once they are more than half of the heap."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, progress: RequestProgress) -> None:
        """Watch a request, if it has a deadline."""
        if progress.request.deadline is not None:
            heappush(self.entries, (progress.due, progress.request.request_id))

    def is_over(self, now: float) -> bool:
        """Whether a deadline has passed that `expired` has not returned."""
        return bool(self.entries) and self.entries[0][0] <= now

    def expired(self, now: float, requests: Mapping[str, RequestProgress]) -> list[RequestProgress]:
        """The requests whose deadline has passed, each once. ``requests`` are all active ones."""
        if len(self.entries) > 2 * len(requests):
            # more than half are dropped, so the scan is amortised over their insertions
            self.entries = [entry for entry in self.entries if _is_due(entry, requests)]
            heapify(self.entries)
        over = []
        while self.entries and self.entries[0][0] <= now:
            entry = heappop(self.entries)
            if _is_due(entry, requests):
                over.append(requests[entry[1]])
        return over


def _is_due(entry: tuple[float, str], requests: Mapping[str, RequestProgress]) -> bool:
    due, name = entry
    progress = requests.get(name)
    # a later request with another deadline may have the same id
    return progress is not None and progress.due == due
