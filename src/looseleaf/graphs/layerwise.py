"""Hooks of single layers: waits for KV pages that still load, and rows that enter late.

Each layer of a step waits for the pages of that layer. Late rows enter a step at a later layer,
because earlier layers are computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.graphs.rows import IntArray, to_device
from looseleaf.kv.store import PendingLoad
from looseleaf.types import Attend, Expand, ExpandingAttend, LayerHook


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

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        begun, since = time.perf_counter(), _now() if self.timed else None
        wait_for_layer(self.awaited, layer)
        self.waited += time.perf_counter() - begun
        if since is not None:
            self.waits.append((since, _now()))
        return self.attend(layer, q, k, v)

    def num_expanded(self, layer: int) -> int:
        """See `looseleaf.types.ExpandingAttend`."""
        attend = self.attend
        return attend.num_expanded(layer) if isinstance(attend, ExpandingAttend) else 0

    def attend_expanded(self, layer: int, q: Tensor, expand: Expand) -> Tensor:
        """See `looseleaf.types.ExpandingAttend`; the layer's keys have been awaited."""
        assert isinstance(self.attend, ExpandingAttend), "other steps expand no keys"
        return self.attend.attend_expanded(layer, q, expand)


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


@dataclass(frozen=True)
class LateRows:
    """Ascending ``rows`` of a step that enter at ``layer``, with their ``hidden`` states before it.

    Their keys and values of earlier layers are stored already and do not change."""

    layer: int
    rows: IntArray
    hidden: Tensor


def enter_late(late_rows: Sequence[LateRows], slots: Tensor) -> LayerHook:
    """The hook that inserts late rows; it runs before each layer at which rows enter.

    ``slots`` of the late rows are -1 until they enter, so earlier layers do not write their keys
    and values."""
    groups = [(late, to_device(torch.from_numpy(late.rows), slots.device)) for late in late_rows]
    late_slots = [slots[rows] for _, rows in groups]
    for _, rows in groups:
        slots[rows] = -1

    def enter(layer: int, hidden: Tensor) -> Tensor:
        for (late, rows), own_slots in zip(groups, late_slots, strict=True):
            if late.layer == layer:
                slots[rows] = own_slots
                hidden = hidden.index_copy(0, rows, late.hidden)
        return hidden

    return enter
