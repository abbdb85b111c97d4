"""One segment on its way into pages: who waits for its layers, and what becomes of it.

On a GPU a layer that was delivered is on its way, and an event says when it is there; the load has
ended when the last of them has come."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.base import Record, TierFault
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.pool_copy import PoolCopy

_GLANCE_SECONDS = 2e-4

LoadState = Literal["loading", "done", "failed", "cancelled"]


class LoadFailed(Exception):
    """A segment that a step waits for will not come: it has to be computed."""


class Load:
    """One segment on its way into ``pages``. Only the engine's thread waits, cancels and settles.

    ``record`` is what is expected to be found, and what was found once that is known.

    ``seconds`` is how long it took, once it ended, from ``queued`` on the clock
    `time.perf_counter`."""

    def __init__(
        self,
        record: Record,
        pages: Sequence[int],
        copy: PoolCopy,
        guard: Guard,
        timeout: float,
        fence: torch.cuda.Event | None,
        changed: threading.Condition | None = None,
    ) -> None:
        """``fence`` is `PoolCopy.fence` now: rows of an earlier owner of the pages may not be
        computed yet. Loads that are sent together share ``changed``."""
        self.record = record
        self.pages = pages
        self.guard = guard
        self.queued = time.perf_counter()
        self.seconds: float | None = None
        self._copy = copy
        self._timeout = timeout
        self._moved = self.queued
        self._state: LoadState = "loading"
        self._layers = 0
        self._events: list[torch.cuda.Event] = []
        # whether somebody has waited for a layer
        self.followed = False
        # whether that was a pass whose kernels are launched one by one, by a thread that needs the
        # interpreter as those do that load
        self.launched = False
        # how many threads load at the same time for the same request
        self.hands = 1
        self.fence = fence
        # asks for one more copy of this load and those beside it, if it comes by copies; False if
        # there is none
        self.ask: Callable[[], bool] | None = None
        self.changed = changed or threading.Condition()

    @property
    def tier(self) -> str:
        """The name of the tier that it comes from."""
        return self.guard.name

    @property
    def state(self) -> LoadState:
        """How far it is; a load without a sign of life for too long has failed."""
        with self.changed:
            self._expire()
            last = self._events[-1] if self._events else None
            state = self._state
        on_its_way = state == "done" and last is not None and not last.query()
        return "loading" if on_its_way else state

    def sent_by(self, layer: int) -> torch.cuda.Event | None:
        """Return when ``layer`` is sent to a GPU, with the event of its arrival, or there, with
        None; raises LoadFailed.

        Whoever waits asks for copies himself: no other thread has to wake, and none takes the
        interpreter from the one that launches."""
        self.followed = True
        if layer < self._layers:
            return self._events[layer] if self._events else None
        while self.ask is not None and self._waits_for(layer) and self.ask():
            pass
        with self.changed:
            while self._layers <= layer and self._state == "loading":
                self.changed.wait(max(0.0, self._moved + self._timeout - time.perf_counter()))
                self._expire()
            if self._layers <= layer:
                raise LoadFailed(f"a document could not be loaded from the {self.tier} tier")
            return self._events[layer] if self._events else None

    def _waits_for(self, layer: int) -> bool:
        with self.changed:
            return self._layers <= layer and self._state == "loading"

    def beside_launches(self) -> None:
        """A pass follows on a GPU whose kernels are launched one by one."""
        self.launched = True

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until it has ended or failed, for that long at most; whether it has."""
        end = time.perf_counter() + seconds
        with self.changed:
            self.changed.wait_for(lambda: self._state != "loading", seconds)
        while (coming := self.state == "loading") and time.perf_counter() < end:
            time.sleep(_GLANCE_SECONDS)
        return not coming

    def cancel(self) -> None:
        """Nothing is written to the pages any more."""
        with self.changed:
            self._end("cancelled")
            # one that had come or failed, and nobody had looked yet, is nobody's now
            self._state = "cancelled"
        self.settle()

    def settle(self) -> None:
        """On a GPU, what is launched next finds all that was written so far."""
        with self.changed:
            last = self._events[-1] if self._events else None
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    # what follows is called by the loader's threads

    def deliver(self, first: int, content: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Bring layers from ``first`` on to the pool; False if nobody wants them any more."""
        with self.changed:
            if self._state != "loading":
                return False
            event = self._copy.write_layers(self.record, first, self.pages, content, self.fence)
            self.sent(len(content), event)
            return True

    def fail(self) -> None:
        """It will not come."""
        with self.changed:
            self._end("failed")

    def arrived(self) -> None:
        """All that was delivered is there."""
        with self.changed:
            if self._events and self._state == "done":
                self.seconds = time.perf_counter() - self.queued

    def event(self, layer: int) -> torch.cuda.Event | None:
        """When a layer that was delivered has left the host's memory, -1 for the last one so far;
        None for at once."""
        with self.changed:
            return self._events[layer] if self._events else None

    @property
    def wanted(self) -> bool:
        """Whether its layers are still to be brought; to be asked with ``changed`` held."""
        return self._state == "loading"

    def sent(self, num_layers: int, event: torch.cuda.Event | None) -> None:
        """The next layers are there when ``event`` comes, None for now; with ``changed`` held."""
        if event is not None:
            self._events += [event] * num_layers
        self._layers += num_layers
        self._moved = time.perf_counter()
        if self._layers == self.record.num_layers:
            self._end("done")
        self.changed.notify_all()

    def _end(self, state: LoadState) -> None:
        if self._state == "loading":
            self._state = state
            self.seconds = time.perf_counter() - self.queued
            self.changed.notify_all()

    def _expire(self) -> None:
        if self._state == "loading" and time.perf_counter() - self._moved >= self._timeout:
            self._end("failed")
            self.guard.fail(TierFault("timeout", f"nothing came for {self._timeout:g} s"))


def send(
    loads: Sequence[Load], layers: range, write: Callable[[list[Load]], torch.cuda.Event]
) -> tuple[list[Load], torch.cuda.Event | None]:
    """Have ``write`` send ``layers`` of those loads that are wanted, while none of them is let go
    of; which these are, and when what was sent is there."""
    with ExitStack() as held:
        for changed in dict.fromkeys(load.changed for load in loads):
            held.enter_context(changed)
        wanted = [load for load in loads if load.wanted]
        if not wanted:
            return [], None
        event = write(wanted)
        for load in wanted:
            load.sent(len(layers), event)
        return wanted, event
