"""Which requests have run out of time."""

from heapq import heappop, heappush
from itertools import count

from looseleaf.engine.progress import RequestProgress


class Deadlines:
    """Requests by the moment at which they must have ended, on the clock `time.perf_counter`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestProgress]] = []
        self._numbers = count()

    def add(self, progress: RequestProgress) -> None:
        """Watch a request, if it has a deadline."""
        deadline = progress.request.deadline
        if deadline is not None:
            heappush(self._heap, (progress.arrived + deadline, next(self._numbers), progress))

    def expired(self, now: float) -> list[RequestProgress]:
        """Those whose time is over and that have not ended, once each."""
        over = []
        while self._heap and self._heap[0][0] <= now:
            progress = heappop(self._heap)[2]
            if not progress.finished:
                over.append(progress)
        return over
