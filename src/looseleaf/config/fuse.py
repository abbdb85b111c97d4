"""The fuse policy of a request: which tokens of reused documents are computed again."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

from looseleaf.config.option import (
    require,
    require_each,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
    shown,
)

FuseSelector = Literal["none", "all", "first", "random", "deviation", "question", "links", "ape"]
"""Which tokens are computed again: none, all, the first of every document, a random control, those
whose keys and values deviate, those that the question reads, or these and the chains behind
them. ``ape`` computes none: all documents stand at one place and are weighed as a whole."""

EvaluatedSelector = Literal[FuseSelector, "oracle"]
"""``oracle`` needs the full prefill that blending avoids: for evaluation only."""

_BUDGETS = ("ratio", "tokens", "threshold", "seconds")
_FIXED = ("ratio", "tokens", "seconds")
_TAKES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "all": (),
    "first": (*_FIXED, "balanced"),
    "random": (*_FIXED, "balanced"),
    "links": (*_FIXED, "watched_share"),
    "deviation": (*_BUDGETS, "check_layers", "check_factors"),
    "question": (*_BUDGETS, "watched_share"),
    "ape": ("temperature", "scale"),
    "oracle": ("ratio", "tokens", "threshold"),
}
"""What each selector can be told; at most one of the budgets at a time."""

_MOST_TIMES = 1e6
# beyond it scores leave the range of fp32, and answers are no words
_APE_RANGE = (0.001, 100.0)
_DEFAULT_RATIO = 0.15
_DEFAULT_FIRST = 16


@dataclass(frozen=True)
class Fuse:
    """Which tokens of its reused documents a request computes again, now that they meet.

    A document encoded by itself knows nothing of those before it. ``selector`` chooses tokens of
    all documents but one that stands directly behind what it was encoded behind; they are computed
    in their place and seen by this request only. How many: ``ratio``, a share of the tokens to
    choose from (default 0.15); or ``tokens``, a number, for ``first`` of each document (default
    16); or ``seconds``, as many as the pass that answers can compute in that time with its text, as
    far as is known when the request comes: the report says what share that was; or, for
    ``question`` and ``deviation``, ``threshold``, the score above which a token is chosen.
    ``none``, ``all`` and ``ape`` take none of these. ``watched_share`` of the layers, the last
    ones, tell what the question reads; ``check_layers``, from 1, rising, are where deviation is
    measured, each leaving fewer tokens to the next: ``check_factors`` times the budget, never
    rising, at the last the budget itself; left out, they fall to it evenly from half as much again.
    With ``balanced`` the budget is the least: it is raised to what can be computed while the
    documents load from their tiers, so it depends on how fast these are and where the documents
    happen to be; the report says what it was. Only for ``first`` and ``random``: the others choose
    by what they read, and wait for it. ``ape`` divides scores of document tokens by
    ``temperature``, and multiplies the log-sum-exp of all of them by ``scale``. Raises
    InvalidOption.
    """

    selector: EvaluatedSelector = "none"
    ratio: float | None = None
    tokens: int | None = None
    threshold: float | None = None
    seconds: float | None = None
    watched_share: float = 0.25
    check_layers: tuple[int, ...] = (2,)
    check_factors: tuple[float, ...] = ()
    balanced: bool = False
    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        require_kinds(self)
        takes = _TAKES[self.selector]
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        wrong = [name for name in self._stated() if name not in takes]
        require(
            not wrong,
            f"selector {self.selector!r} takes {' or '.join(takes) or 'no budget'}, not "
            f"{', '.join(wrong)}",
            "selector",
            *takes,
            *wrong,
        )
        require(len(given) < 2, f"give one of {' and '.join(given)}", *given)
        require_share(self, "ratio", zero=True)
        require_not_negative(self, "tokens")
        require_positive(self, "seconds")
        require(
            self.seconds is None or not self.balanced,
            "seconds and balanced both limit the time of computing again: give one of them",
            "seconds",
            "balanced",
        )
        require_share(self, "watched_share")
        layers = self.check_layers
        require(
            len(layers) > 0 and list(layers) == sorted(set(layers)) and layers[0] >= 1,
            f"check_layers must rise and begin at 1 or later, not {shown(layers)}",
            "check_layers",
        )
        factors = self.check_factors
        require(
            not factors or (len(factors), factors[-1], self.threshold) == (len(layers), 1.0, None),
            "check_factors must be as many as check_layers, the last of them 1, without a "
            f"threshold, not {shown(factors)}",
            "check_factors",
            "check_layers",
            "threshold",
        )
        require(
            all(1 <= b <= a <= _MOST_TIMES for a, b in pairwise((_MOST_TIMES, *factors))),
            "check_factors must be at least 1 and never rise, since a token left out can't come "
            f"back, not {shown(factors)}",
            "check_factors",
        )
        least, most = _APE_RANGE
        rule = f"from {least} to {most:g}"
        require_each(self, rule, lambda v: least <= v <= most, "temperature", "scale")
        if not given and self.selector == "first":
            object.__setattr__(self, "tokens", _DEFAULT_FIRST)
        elif not given and "ratio" in takes:
            object.__setattr__(self, "ratio", _DEFAULT_RATIO)

    def settings(self) -> dict[str, Any]:
        """The selector and the values of all fields that it takes, as plain values."""
        named = {name: getattr(self, name) for name in _TAKES[self.selector]}
        return {
            "selector": self.selector,
            **{
                n: list(v) if isinstance(v, tuple) else v
                for n, v in named.items()
                if v is not None and v is not False and v != ()
            },
        }

    def _stated(self) -> list[str]:
        """The fields that have another value than their default."""
        others = [field for field in fields(self) if field.name != "selector"]
        return [field.name for field in others if getattr(self, field.name) != field.default]

    def __str__(self) -> str:
        several = ("check_layers", "check_factors")
        told = [*_BUDGETS, *(n for n in self._stated() if n not in (*_BUDGETS, *several))]
        given = [f"{n} {getattr(self, n):g}" for n in told if getattr(self, n) is not None]
        if "check_layers" in self._stated():
            given.append("layers " + " ".join(map(str, self.check_layers)))
        if self.check_factors:
            given.append("factors " + " ".join(f"{factor:g}" for factor in self.check_factors))
        return ", ".join([self.selector, *given])
