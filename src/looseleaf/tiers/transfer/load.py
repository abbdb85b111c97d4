"""One segment on its way into pages: who waits for its layers, and what becomes of it.

On a GPU a layer that was delivered is on its way, and an event says when it is there; the load has
ended when the last of them has come."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.base import Record, TierFault
from looseleaf.tiers.transfer.copy_engine import Order
from looseleaf.tiers.transfer.pool_copy import PoolCopy

_GLANCE_SECONDS = 2e-4
# how long a pass waits for a layer before it asks whether something else is to be done
_PATIENCE_SECONDS = 0.02

LoadState = Literal["loading", "done", "failed", "cancelled"]


class LoadFailed(Exception):
    """A segment that a step waits for will not come: it has to be computed."""


class LoadPostponed(LoadFailed):
    """A segment that a step waits for still comes, but something else is to be done meanwhile."""


class Line:
    """Loads that a thread brings one after the other, and when it last showed a sign of life: those
    behind a slow one wait, and have not failed."""

    def __init__(self) -> None:
        self.moved = -math.inf


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
    ) -> None:
        """``fence`` is `PoolCopy.fence` now: rows of an earlier owner of the pages may not be
        computed yet."""
        self.record = record
        self.pages = pages
        self.guard = guard
        self.queued = time.perf_counter()
        self.seconds: float | None = None
        self._copy = copy
        self._timeout = timeout
        # who brings it, with what else
        self.line = Line()
        # whether a pass that waits for it should do something else
        self.hurry: Callable[[], bool] = _never
        self._state: LoadState = "loading"
        self._layers = 0
        self._events: list[torch.cuda.Event] = []
        # whether that was a pass whose kernels are launched one by one, by a thread that needs the
        # interpreter as those do that load
        self.launched = False
        # how many threads load at the same time for the same request
        self.hands = 1
        self.fence = fence
        # the order that brings it, and which of its documents it is, if it comes by copies
        self._ordered: tuple[Order, int] | None = None
        self._changed = threading.Condition()

    @property
    def tier(self) -> str:
        """The name of the tier that it comes from."""
        return self.guard.name

    @property
    def state(self) -> LoadState:
        """How far it is; a load without a sign of life for too long has failed."""
        with self._changed:
            self._look()
            self._expire()
            last, state = self.event(-1), self._state
        on_its_way = state == "done" and last is not None and not last.query()
        return "loading" if on_its_way else state

    def sent_by(self, layer: int) -> torch.cuda.Event | None:
        """Return when ``layer`` is sent to a GPU, with the event of its arrival, or there, with
        None; raises LoadFailed, and LoadPostponed where there is no time to wait for it."""
        if self._ordered is not None:
            self._await_order(*self._ordered, layer)
        with self._changed:
            while self._layers <= layer and self._state == "loading":
                left = self._last_sign + self._timeout - time.perf_counter()
                self._changed.wait(max(0.0, min(_PATIENCE_SECONDS, left)))
                self._expire()
                if self._layers <= layer and self._state == "loading" and self.hurry():
                    raise LoadPostponed("a document comes too slowly to wait for it now")
            if self._layers <= layer:
                raise LoadFailed(f"a document could not be loaded from the {self.tier} tier")
        return self.event(layer)

    def _await_order(self, order: Order, document: int, layer: int) -> None:
        """Wait until a layer of what is ordered is asked for, or no more is."""
        if self._layers > layer:
            return
        order.wait(document, layer, self._timeout)
        with self._changed:
            self._look()
            if self._layers <= layer and self._state == "loading":
                self._give_up()

    def beside_launches(self) -> None:
        """A pass follows on a GPU whose kernels are launched one by one."""
        self.launched = True

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until it has ended or failed, for that long at most; whether it has."""
        end = time.perf_counter() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading", seconds)
        while (coming := self.state == "loading") and time.perf_counter() < end:
            time.sleep(_GLANCE_SECONDS)
        return not coming

    def cancel(self) -> None:
        """Nothing is written to the pages any more."""
        with self._changed:
            self._look()
            self._end("cancelled")
            # one that had come or failed, and nobody had looked yet, is nobody's now
            self._state = "cancelled"
            self._drop()
        self.settle()

    def settle(self) -> None:
        """On a GPU, what is launched next finds all that was written so far."""
        last = self.event(-1)
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    # what follows is called by the loader's threads

    def deliver(self, first: int, content: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Bring layers from ``first`` on to the pool; False if nobody wants them any more."""
        with self._changed:
            if self._state != "loading":
                return False
            event = self._copy.write_layers(self.record, first, self.pages, content, self.fence)
            if event is not None:
                self._events += [event] * len(content)
            self._send(self._layers + len(content))
            return True

    def follow(self, order: Order, document: int) -> None:
        """It comes with an order, as that document of it."""
        with self._changed:
            self._ordered = order, document

    def look(self) -> None:
        """See how far the order is that it comes with."""
        with self._changed:
            self._look()

    def fail(self) -> None:
        """It will not come."""
        with self._changed:
            self._end("failed")
            self._drop()

    def arrived(self) -> None:
        """All that was delivered is there."""
        with self._changed:
            if self._state == "done" and (self._events or self._ordered is not None):
                self.seconds = time.perf_counter() - self.queued

    def event(self, layer: int) -> torch.cuda.Event | None:
        """When a layer that was delivered has left the host's memory, -1 for the last one so far;
        None for at once."""
        if self._ordered is not None:
            order, document = self._ordered
            return order.event(document, layer)
        with self._changed:
            return self._events[layer] if self._events else None

    def _look(self) -> None:
        if self._ordered is None or self._state != "loading":
            return
        order, document = self._ordered
        if (layers := order.num_layers(document)) > self._layers:
            self._send(layers)
        elif order.failed:
            self._end("failed")

    def _send(self, num_layers: int) -> None:
        """So many layers are there, or on their way."""
        self._layers, self.line.moved = num_layers, time.perf_counter()
        if num_layers == self.record.num_layers:
            self._end("done")
        self._changed.notify_all()

    def _drop(self) -> None:
        if self._ordered is not None:
            order, document = self._ordered
            order.drop(document)

    def _end(self, state: LoadState) -> None:
        if self._state == "loading":
            self._state = state
            self.seconds = time.perf_counter() - self.queued
            self._changed.notify_all()

    @property
    def _last_sign(self) -> float:
        return max(self.queued, self.line.moved)

    def _expire(self) -> None:
        if self._state == "loading" and time.perf_counter() - self._last_sign >= self._timeout:
            self._give_up()

    def _give_up(self) -> None:
        self._end("failed")
        self._drop()
        self.guard.fail(TierFault("timeout", f"nothing came for {self._timeout:g} s"))


def _never() -> bool:
    return False
