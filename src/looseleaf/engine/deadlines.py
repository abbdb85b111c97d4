"""Which requests have run out of time."""

from collections.abc import Mapping
from heapq import heappop, heappush

from looseleaf.engine.progress import RequestProgress


class Deadlines:
    """Requests by the moment at which they must have ended, on the clock `time.perf_counter`.

    Names only: a request that ends before its deadline must not be kept until then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, progress: RequestProgress) -> None:
        """Watch a request, if it has a deadline."""
        if progress.request.deadline is not None:
            heappush(self._heap, (progress.due, progress.request.request_id))

    def is_over(self, now: float) -> bool:
        """Whether some time is over that `expired` has not told yet."""
        return bool(self._heap) and self._heap[0][0] <= now

    def expired(self, now: float, requests: Mapping[str, RequestProgress]) -> list[RequestProgress]:
        """Those of ``requests`` whose time is over, once each."""
        over = []
        while self._heap and self._heap[0][0] <= now:
            due, name = heappop(self._heap)
            progress = requests.get(name)
            # the name may be another request's by now, which has a deadline of its own
            if progress is not None and progress.due == due:
                over.append(progress)
        return over
