"""One segment that loads into pages: its state, its layers' arrival, and its cancellation.

On a GPU a delivered layer is in flight until its event. The load ends with the last event."""

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
from looseleaf.tiers.transfer.copy_engine import Transfer
from looseleaf.tiers.transfer.pool_copy import PoolCopy

_POLL_SECONDS = 2e-4
# how often a waiting pass checks for other work
_CHECK_SECONDS = 0.02

LoadState = Literal["loading", "done", "failed", "cancelled"]


class LoadFailed(Exception):
    """A segment that a step waits for failed to load and has to be computed."""


class LoadPostponed(LoadFailed):
    """A segment still loads, but the engine has other work now."""


class Heartbeat:
    """The last progress of a loading thread, in seconds of `time.perf_counter`.

    Loads that queue after a slow one have not failed while the thread makes progress."""

    def __init__(self) -> None:
        self.time = -math.inf


class Load:
    """One segment that loads into ``pages``. Only the engine's thread waits, cancels and settles.

    ``record`` is the expected record, replaced by the stored one after it is opened. ``seconds`` is
    the duration since ``queued`` (`time.perf_counter`), None until the load ends."""

    def __init__(
        self,
        record: Record,
        pages: Sequence[int],
        copy: PoolCopy,
        guard: Guard,
        timeout: float,
        fence: torch.cuda.Event | None,
    ) -> None:
        """``fence`` is `PoolCopy.fence`: rows may still read the pages' previous content."""
        self.record = record
        self.pages = pages
        self.guard = guard
        self.queued = time.perf_counter()
        self.seconds: float | None = None
        self._copy = copy
        self._timeout = timeout
        # of the thread that loads it
        self.heartbeat = Heartbeat()
        # whether a waiting pass should yield to other work
        self.hurry: Callable[[], bool] = _never
        self._state: LoadState = "loading"
        self._layers = 0
        self._events: list[torch.cuda.Event] = []
        # whether a pass launches its kernels one by one, in a thread that competes for the
        # interpreter
        self.launched = False
        # the number of threads that load for the same request
        self.workers = 1
        self.fence = fence
        # the transfer and the document number, if the copy engine loads it
        self._transfer: tuple[Transfer, int] | None = None
        self._changed = threading.Condition()

    @property
    def tier(self) -> str:
        """The name of the source tier."""
        return self.guard.name

    @property
    def state(self) -> LoadState:
        """The state; a load without progress within the timeout has failed."""
        with self._changed:
            self._refresh()
            self._expire()
            last, state = self.event(-1), self._state
        in_flight = state == "done" and last is not None and not last.query()
        return "loading" if in_flight else state

    def sent_by(self, layer: int) -> torch.cuda.Event | None:
        """Waits until ``layer`` is delivered; returns its arrival event, None if it has arrived.
        Layers after the last stored one share the KV of earlier layers.

        Raises LoadFailed, and LoadPostponed if the engine has other work."""
        layer = min(layer, self.record.num_layers - 1)
        if self._transfer is not None:
            self._await_transfer(*self._transfer, layer)
        with self._changed:
            while self._layers <= layer and self._state == "loading":
                remaining = self._last_sign + self._timeout - time.perf_counter()
                self._changed.wait(max(0.0, min(_CHECK_SECONDS, remaining)))
                self._expire()
                if self._layers <= layer and self._state == "loading" and self.hurry():
                    raise LoadPostponed("a document loads slowly, and the engine has other work")
            if self._layers <= layer:
                raise LoadFailed(f"a document could not be loaded from the {self.tier} tier")
        return self.event(layer)

    def _await_transfer(self, transfer: Transfer, document: int, layer: int) -> None:
        """Waits until a layer is submitted, or the transfer is finished."""
        if self._layers > layer:
            return
        transfer.wait(document, layer, self._timeout)
        with self._changed:
            self._refresh()
            if self._layers <= layer and self._state == "loading":
                self._give_up()

    def beside_launches(self) -> None:
        """Marks that a pass launches its kernels one by one during this load."""
        self.launched = True

    def wait_for_end(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for the end of the load; returns whether it ended."""
        end = time.perf_counter() + seconds
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading", seconds)
        while (is_loading := self.state == "loading") and time.perf_counter() < end:
            time.sleep(_POLL_SECONDS)
        return not is_loading

    def cancel(self) -> None:
        """Ends the load; nothing is written to its pages later."""
        with self._changed:
            self._refresh()
            self._end("cancelled")
            # replaces an end that no caller has seen
            self._state = "cancelled"
            self._drop()
        self.settle()

    def settle(self) -> None:
        """On a GPU, orders later kernels after all writes so far."""
        last = self.event(-1)
        if last is not None:
            torch.cuda.current_stream().wait_event(last)

    # the loader threads call the methods below

    def deliver(self, first: int, content: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Writes layers from ``first`` on to the pool; returns False if the load has ended."""
        with self._changed:
            if self._state != "loading":
                return False
            event = self._copy.write_layers(self.record, first, self.pages, content, self.fence)
            if event is not None:
                self._events += [event] * len(content)
            self._advance(self._layers + len(content))
            return True

    def attach(self, transfer: Transfer, document: int) -> None:
        """Makes the load document number ``document`` of a transfer."""
        with self._changed:
            self._transfer = transfer, document

    def refresh(self) -> None:
        """Reads the progress of the transfer."""
        with self._changed:
            self._refresh()

    def fail(self) -> None:
        with self._changed:
            self._end("failed")
            self._drop()

    def record_arrival(self) -> None:
        """Corrects `seconds` after the last arrival event."""
        with self._changed:
            if self._state == "done" and (self._events or self._transfer is not None):
                self.seconds = time.perf_counter() - self.queued

    def event(self, layer: int) -> torch.cuda.Event | None:
        """The arrival event of a delivered layer, -1 for the last one so far; None if arrived."""
        if self._transfer is not None:
            transfer, document = self._transfer
            return transfer.event(document, layer)
        with self._changed:
            return self._events[layer] if self._events else None

    def _refresh(self) -> None:
        if self._transfer is None or self._state != "loading":
            return
        transfer, document = self._transfer
        if (layers := transfer.num_layers(document)) > self._layers:
            self._advance(layers)
        elif transfer.failed:
            self._end("failed")

    def _advance(self, num_layers: int) -> None:
        self._layers, self.heartbeat.time = num_layers, time.perf_counter()
        if num_layers == self.record.num_layers:
            self._end("done")
        self._changed.notify_all()

    def _drop(self) -> None:
        if self._transfer is not None:
            transfer, document = self._transfer
            transfer.drop(document)

    def _end(self, state: LoadState) -> None:
        if self._state == "loading":
            self._state = state
            self.seconds = time.perf_counter() - self.queued
            self._changed.notify_all()

    @property
    def _last_sign(self) -> float:
        return max(self.queued, self.heartbeat.time)

    def _expire(self) -> None:
        if self._state == "loading" and time.perf_counter() - self._last_sign >= self._timeout:
            self._give_up()

    def _give_up(self) -> None:
        self._end("failed")
        self._drop()
        self.guard.fail(TierFault("timeout", f"no layer arrived for {self._timeout:g} s"))


def _never() -> bool:
    return False
