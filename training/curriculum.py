"""The stages of training and when each is mastered. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from training.data import Stage

INDUCTION = Stage("induction", induction=True)
SHORT = Stage("short", documents=(1, 2), facts=(1, 2), fillers=(0, 0), questions=(3, 5))
MEDIUM = Stage("medium", documents=(2, 4), facts=(1, 4), fillers=(0, 1), questions=(4, 7))
LONG = Stage("long", documents=(2, 6), facts=(2, 6), fillers=(0, 3), questions=(5, 9))
FULL = Stage("full", documents=(1, 8), facts=(2, 9), fillers=(0, 5), questions=(6, 12))

CAUSAL: tuple[Stage, ...] = (INDUCTION, SHORT, MEDIUM, LONG, FULL)
# documents mostly on their own; a share stays causal, so that the checkpoint can do both
BLOCK: tuple[Stage, ...] = (replace(FULL, name="block", independent=0.75, chains=0.15),)

# for weights that have been through the curriculum: contexts of the length that is asked for
POLISH: tuple[Stage, ...] = (
    replace(FULL, name="polish", documents=(3, 8), fillers=(0, 4), questions=(8, 14), chains=0.35),
)
# block tuning on everyday notes as well, so that text from anywhere is read, not only the world's
NOTES: tuple[Stage, ...] = (replace(BLOCK[0], name="notes", everyday=0.5),)
# for weights that have been through the curriculum: all five tasks, and contexts that grow with the
# share of the schedule that is over
GROW = replace(
    FULL, name="grow", documents=(1, 8), fillers=(0, 4), questions=(6, 12), chains=0.3,
    max_hops=4, look_alikes=0.3, roll_calls=0.2, run_on=0.1, everyday=0.25,
    long_samples=5, long_tokens=(800, 7_000), until=0.2,
)  # fmt: skip
FAR = replace(GROW, name="far", long_samples=3, long_tokens=(1_200, 18_500), until=0.4)
# what a chain hands on must stand in one word, not in those after it as well, or no pass over a few
# tokens brings it back
LAST = replace(FAR, name="last", long_samples=3, long_tokens=(2_000, 19_000), fused=0.4, until=1.0)
LENGTHEN: tuple[Stage, ...] = (GROW, FAR, LAST)
FORETOLD: tuple[Stage, ...] = (
    replace(
        LAST,
        name="foretold",
        foretold=True,
        chains=0.35,
        long_samples=2,
        long_tokens=(14_000, 19_900),
    ),
)
# and what `block` is then tuned on
FAR_BLOCK = replace(
    LAST, name="far block", independent=0.75, chains=0.15, everyday=0.5, long_samples=1, fused=0.0
)
CURRICULA: MappingProxyType[str, tuple[Stage, ...]] = MappingProxyType(
    {
        "causal": CAUSAL,
        "polish": POLISH,
        "block": BLOCK,
        "notes": NOTES,
        "lengthen": LENGTHEN,
        "foretold": FORETOLD,
        "far-block": (FAR_BLOCK,),
    }
)


@dataclass(frozen=True)
class Mastery:
    """What the moving averages of exact match must reach before the next stage begins."""

    repeat: float = 0.85
    lookup: float = 0.88
    bridge: float = 0.72
    inherited: float = 0.85

    def reached(self, stage: Stage, exact: dict[str, float], done: float = 0.0) -> bool:
        if stage.until is not None:
            return done >= stage.until
        wanted = (
            {"repeat": self.repeat}
            if stage.induction
            else {"lookup": self.lookup, "bridge": self.bridge, "inherited": self.inherited}
        )
        return all(exact.get(kind, 0.0) >= least for kind, least in wanted.items())
