"""What is copied from the host's memory to a GPU at a time, and who asks for it.

A copy costs its asking, so there are few, the first layers of all documents first. Those with which
a step can begin are asked for at once; then whoever waits for a layer asks, and a thread for what
nobody waits for."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from looseleaf.tiers.load import Load


@dataclass(frozen=True)
class Portions:
    """How much is copied to a GPU at a time: of all documents the ``first`` that a step can begin
    with, then a ``second`` that comes while it is planned, so that ``at_once`` is asked for at
    once; then ``one`` document's layers, or None for as many of all as go ``together``, and so much
    together; in bytes. And how many such copies are asked for ``ahead``."""

    first: int
    second: int
    at_once: int
    one: int | None
    together: int
    ahead: int


_PLAIN = Portions(26 << 20, 52 << 20, 64 << 20, 6 << 20, 18 << 20, 2)
# a kernel behind each copy: to launch it takes as long as to ask for six copies
_PACKED = Portions(30 << 20, 40 << 20, 60 << 20, None, 48 << 20, 1)


class Parcel(NamedTuple):
    """What was asked for in one copy: its bytes, and when it is there, if anybody wants it."""

    num_bytes: int
    event: torch.cuda.Event | None


@dataclass(eq=False)
class Sending:
    """Loads whose layers are copied to a GPU: each of ``parcels`` is asked for when it is taken
    from there, by the thread that loads or by whoever waits for a layer. ``num_bytes`` were asked
    for so far."""

    loads: Sequence[Load]
    parcels: Iterator[Parcel]
    portions: Portions
    num_bytes: int = 0
    _under_way: deque[torch.cuda.Event] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_at_once(self) -> None:
        """Ask for what is not waited for."""
        while self.num_bytes < self.portions.at_once and self.ask():
            pass

    def ask(self) -> bool:
        """Ask for one more; False if there is none."""
        with self._lock:
            parcel = next(self.parcels, None)
            if parcel is None:
                return False
            self.num_bytes += parcel.num_bytes
            if parcel.event is not None:
                self._under_way.append(parcel.event)
            return True

    def ask_for_rest(self) -> None:
        """Ask for all others that nobody asks for who waits."""
        while True:
            # copies of another stream may wait as long as there is any of these: until a step
            # follows, it is one by one. One that is replayed asks for all itself, in less time than
            # they take; beside one that is launched some are asked for ahead
            launched = any(load.launched for load in self.loads)
            while len(self._under_way) > (self.portions.ahead if launched else 0):
                self._under_way.popleft().synchronize()
            if not self.ask():
                return


def parcels_of(loads: Sequence[Load]) -> Iterator[tuple[range, list[Load]]]:
    """Layers and loads that are sent together, in the order in which a step wants them.

    A copy costs its asking, so of short documents several layers go at a time. The first few are
    asked for at once, and a step waits for them; the last layers go one by one, since a step still
    has to compute them."""
    start, num_layers = 0, max((load.record.num_layers for load in loads), default=0)
    sizes = [load.record.layer_bytes for load in loads] or [1]
    portions = portions_of(loads)
    while start < num_layers:
        soon = start * sum(sizes) < portions.at_once
        together = portions.second if start else portions.first
        if soon or portions.one is None:
            most = (together if soon else portions.together) // sum(sizes)
        else:
            most = portions.one // max(sizes)
        layers = range(start, start + max(1, min((num_layers - start) // 2, most)))
        at_a_time = max(1, portions.together // (max(sizes) * len(layers)))
        at_a_time = len(loads) if most and soon else at_a_time
        for first in range(0, len(loads), at_a_time):
            yield layers, list(loads[first : first + at_a_time])
        start = layers.stop


def portions_of(loads: Sequence[Load]) -> Portions:
    """How much of ``loads`` is copied at a time."""
    return _PACKED if loads and all(load.record.packed for load in loads) else _PLAIN
