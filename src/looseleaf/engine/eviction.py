"""Eviction in a step: who may throw keys away, and whose queries are watched for it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looseleaf.attention.paged import PagedAttention
from looseleaf.config import EVICTING
from looseleaf.engine.request import DocumentPart, Request
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidRequest
from looseleaf.sparse import Eviction, make_evictor
from looseleaf.types import Attend

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tap(NamedTuple):
    """Rows of a step of an output that throws keys away, consecutive ones of its text."""

    eviction: Eviction
    rows: slice
    ends_prompt: bool


@dataclass(frozen=True)
class Tapped:
    """The attention of a step whose queries are watched."""

    attend: Attend
    taps: Seq[Tap]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for tap in self.taps:
            tap.eviction.see(layer, q[tap.rows], tap.ends_prompt)
        return self.attend(layer, q, k, v)


@dataclass(frozen=True)
class Evictions:
    """Makes the evictions of one engine."""

    attention: PagedAttention

    def check(self, request: Request) -> None:
        """Raise InvalidRequest where keys are to be thrown away that others read, or that have to
        be found by where they stand."""
        select = request.select
        if select is None or select.policy not in EVICTING:
            return
        name = f"select={select.policy!r} throws keys away"
        if any(isinstance(part, DocumentPart) for part in request.parts):
            raise InvalidRequest(
                f"{name}, and documents are read by others too: give them as text, or choose a "
                "policy that keeps everything, such as quest",
                "select",
            )
        if request.revise is not None:
            raise InvalidRequest(
                f"{name}, so that earlier tokens have nothing more to read: leave revise out, or "
                "choose a policy that keeps everything, such as quest",
                "select",
                "revise",
            )
        if any(rule.window or rule.alibi_slopes is not None for rule in self.attention.rules):
            raise InvalidRequest(
                f"{name}, but this model's layers see a window, so they must know where a key "
                "stands: choose a policy that keeps everything, such as window",
                "select",
            )
        if self.attention.pool.kv.dtype not in _DTYPES:
            raise InvalidRequest(
                f"{name}, which is not done with keys of 8 bits: leave kv_dtype out",
                "select",
                "kv_dtype",
            )

    def equip(self, sequence: Sequence, request: Request) -> None:
        """Have ``sequence`` throw keys away, if its request says so."""
        evictor = make_evictor(request.select, request.num_tokens)
        if evictor is not None:
            rotations, rules = self.attention.rotations, self.attention.rules
            sequence.eviction = Eviction(evictor, rotations, rules)
            # its pages change, so they are nobody else's beginning
            sequence.tail.fused = True


def find_taps(work: StepWork, num_decode_rows: int) -> list[Tap]:
    """Who in ``work`` throws keys away, where the rows of chunks begin with ``num_decode_rows``."""
    taps = []
    for row, sequence in enumerate(work.decode):
        if sequence.eviction is not None:
            taps.append(Tap(sequence.eviction, slice(row, row + 1), False))
    start = num_decode_rows
    for chunk in work.chunks:
        stop = start + chunk.stop - chunk.start
        if chunk.sequence.eviction is not None:
            taps.append(Tap(chunk.sequence.eviction, slice(start, stop), chunk.ends_prompt))
        start = stop
    return taps
