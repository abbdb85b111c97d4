"""Layer-wise wait: each layer of a step waits for the KV pages of that layer that still load."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.kv.store import PendingLoad
from looseleaf.types import Attend


@dataclass
class LayerwiseWait:
    """``attend``, which waits for that layer of the ``awaited`` loads first.

    ``waited`` are the seconds that the host waited. If ``timed``, on a GPU, ``waits`` are the begin
    and end of each wait of the stream, and the loads are notified that they run beside
    launches."""

    attend: Attend
    awaited: Sequence[PendingLoad]
    timed: bool = False
    waited: float = 0.0
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for arriving in self.awaited if self.timed else ():
            arriving.beside_launches()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begun, since = time.perf_counter(), _now() if self.timed else None
        wait_for_layer(self.awaited, layer)
        self.waited += time.perf_counter() - begun
        if since is not None:
            self.waits.append((since, _now()))
        return self.attend(layer, q, k, v)


def wait_for_layer(awaited: Sequence[PendingLoad], layer: int) -> None:
    """Make later launches wait for ``layer`` of all ``awaited`` loads; raises their errors."""
    # loads of one transfer share an event, which needs one wait
    events = [arriving.sent_by(layer) for arriving in awaited]
    for event in dict.fromkeys(event for event in events if event is not None):
        event.wait()


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
