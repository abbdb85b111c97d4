"""The attention of a step whose documents are arriving: a layer's keys come before its rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.kv.store import PendingLoad
from looseleaf.types import Attend


@dataclass
class Following:
    """``attend`` behind what is ``awaited``, layer by layer; ``waited`` counts the seconds that the
    host waited for it. On a GPU, if it is to be ``timed``, ``waits`` are when its stream began to
    wait, and when it had what it waited for; and what is awaited hears that it comes beside
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
        follow(self.awaited, layer)
        self.waited += time.perf_counter() - begun
        if since is not None:
            self.waits.append((since, _now()))
        return self.attend(layer, q, k, v)


def follow(awaited: Sequence[PendingLoad], layer: int) -> None:
    """What is launched next finds ``layer`` of all that is ``awaited``; raises what waiting for one
    of them raises."""
    # what is sent together comes together: one wait is enough
    events = [arriving.sent_by(layer) for arriving in awaited]
    for event in dict.fromkeys(event for event in events if event is not None):
        event.wait()


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
