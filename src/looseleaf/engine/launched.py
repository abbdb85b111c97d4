"""A step that was launched: what it computes, and the draws of the tokens that it yields."""

from dataclasses import dataclass, replace

from looseleaf.engine.drawing import Draw
from looseleaf.engine.scheduler import StepWork
from looseleaf.engine.sequence import Phase


@dataclass(frozen=True)
class Launched:
    """A step that the device computes or has computed, and the tokens that it yields."""

    work: StepWork
    draws: list[Draw]


def still_running(work: StepWork) -> StepWork:
    """``work`` without the sequences that have ended since."""
    decode = [s for s in work.decode if s.phase is not Phase.FINISHED]
    chunks = [c for c in work.chunks if c.sequence.phase is not Phase.FINISHED]
    return replace(work, decode=decode, chunks=chunks)
