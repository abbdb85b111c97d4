"""Which requests have run out of time."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from looseleaf.engine.progress import RequestProgress
from looseleaf.errors import DeadlineExceeded


def deadline_error(progress: RequestProgress) -> DeadlineExceeded:
    """The error of a request that has run out of time."""
    return DeadlineExceeded(
        f"the request did not end within its deadline of {progress.request.deadline} s: "
        "allow more time or ask for fewer tokens"
    )


class Deadlines:
    """Requests by the moment at which they must have ended, on the clock `time.perf_counter`.

    Names only: a request that ends before its deadline must not be kept until then. Nor are the
    names, which a client with long deadlines could pile up: they go when they are most of all.
    ``entries`` is a heap of deadlines and names."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, progress: RequestProgress) -> None:
        """Watch a request, if it has a deadline."""
        if progress.request.deadline is not None:
            heappush(self.entries, (progress.due, progress.request.request_id))

    def is_over(self, now: float) -> bool:
        """Whether some time is over that `expired` has not told yet."""
        return bool(self.entries) and self.entries[0][0] <= now

    def expired(self, now: float, requests: Mapping[str, RequestProgress]) -> list[RequestProgress]:
        """Those of ``requests``, which are all that have not ended, whose time is over, once
        each."""
        if len(self.entries) > 2 * len(requests):
            # more than half go: who looks at a name that stays has been paid for by one that came
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
    # the name may be another request's by now, which has a deadline of its own
    return progress is not None and progress.due == due
