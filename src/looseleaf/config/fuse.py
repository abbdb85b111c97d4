"""The fuse policy of a request: which tokens of reused documents are recomputed."""

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
"""The recomputed tokens: none, all, the first of every document, random ones (a control), tokens
whose keys and values deviate (CacheBlend), tokens that the question attends to, or these and the
tokens that they depend on (``links``). ``ape`` recomputes none: all documents share one offset, and
their attention is reweighted (APE)."""

EvaluatedSelector = Literal[FuseSelector, "oracle"]
"""``oracle`` takes the full prefill that blending avoids: for evaluation only."""

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
"""The parameters of each selector; at most one of the budgets can be set."""

_MOST_FACTOR = 1e6
# beyond it scores exceed the range of fp32
_APE_RANGE = (0.001, 100.0)
_DEFAULT_RATIO = 0.15
_DEFAULT_FIRST = 16


@dataclass(frozen=True)
class Fuse:
    """The tokens of its reused documents that a request recomputes at their present positions.

    A document encoded separately does not depend on the documents before it. ``selector`` chooses
    tokens of all documents, except of a document directly after its own context. Recomputed keys
    and values are private to the request. Raises InvalidOption for values out of range, and for
    parameters that the selector does not take.

    ``ratio``
        budget as a share of the candidate tokens (default 0.15).
    ``tokens``
        budget as a number; for ``first``, of each document (default 16).
    ``seconds``
        budget as the estimated compute time of the pass; the reuse report states the share.
    ``threshold``
        for ``question`` and ``deviation``: the score above which a token is recomputed.
    ``watched_share``
        share of the layers, the last ones, whose attention ``question`` and ``links`` use.
    ``check_layers``
        layers, from 1, ascending, at which ``deviation`` is measured; each narrows the candidates.
    ``check_factors``
        candidates after each check layer, in budgets: not ascending, the last 1. By default they
        descend linearly from 1.5.
    ``balanced``
        for ``first`` and ``random``: raises the budget to the tokens that can be computed while the
        documents load from their tiers. The reuse report states the budget.
    ``temperature``, ``scale``
        for ``ape``: divisor of the scores of document tokens, and factor of their log-sum-exp.
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
        budgets = [name for name in _BUDGETS if getattr(self, name) is not None]
        excess = [name for name in self._non_defaults() if name not in takes]
        require(
            not excess,
            f"selector {self.selector!r} takes {' or '.join(takes) or 'no budget'}, not "
            f"{', '.join(excess)}",
            "selector",
            *takes,
            *excess,
        )
        require(len(budgets) < 2, f"give one of {' and '.join(budgets)}", *budgets)
        require_share(self, "ratio", zero=True)
        require_not_negative(self, "tokens")
        require_positive(self, "seconds")
        require(
            self.seconds is None or not self.balanced,
            "seconds and balanced both set a budget by time: give one of them",
            "seconds",
            "balanced",
        )
        require_share(self, "watched_share")
        layers = self.check_layers
        require(
            len(layers) > 0 and list(layers) == sorted(set(layers)) and layers[0] >= 1,
            f"check_layers must be ascending and at least 1, not {shown(layers)}",
            "check_layers",
        )
        factors = self.check_factors
        require(
            not factors or (len(factors), factors[-1], self.threshold) == (len(layers), 1.0, None),
            "check_factors must be one per check layer, the last of them 1, without a threshold, "
            f"not {shown(factors)}",
            "check_factors",
            "check_layers",
            "threshold",
        )
        require(
            all(1 <= b <= a <= _MOST_FACTOR for a, b in pairwise((_MOST_FACTOR, *factors))),
            "check_factors must be at least 1 and never rise, because each layer narrows the "
            f"candidates, not {shown(factors)}",
            "check_factors",
        )
        least, most = _APE_RANGE
        rule = f"from {least} to {most:g}"
        require_each(self, rule, lambda v: least <= v <= most, "temperature", "scale")
        if not budgets and self.selector == "first":
            object.__setattr__(self, "tokens", _DEFAULT_FIRST)
        elif not budgets and "ratio" in takes:
            object.__setattr__(self, "ratio", _DEFAULT_RATIO)

    def settings(self) -> dict[str, Any]:
        """The selector and its parameters, as JSON values."""
        values = {name: getattr(self, name) for name in _TAKES[self.selector]}
        return {
            "selector": self.selector,
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in values.items()
                if value is not None and value is not False and value != ()
            },
        }

    def _non_defaults(self) -> list[str]:
        """Fields besides the selector whose values differ from their defaults."""
        return [
            field.name
            for field in fields(self)
            if field.name != "selector" and getattr(self, field.name) != field.default
        ]

    def __str__(self) -> str:
        changed = self._non_defaults()
        listed = (*_BUDGETS, "check_layers", "check_factors")
        numbers = [*_BUDGETS, *(name for name in changed if name not in listed)]
        parts = [f"{n} {getattr(self, n):g}" for n in numbers if getattr(self, n) is not None]
        if "check_layers" in changed:
            parts.append("layers " + " ".join(map(str, self.check_layers)))
        if self.check_factors:
            parts.append("factors " + " ".join(f"{factor:g}" for factor in self.check_factors))
        return ", ".join([self.selector, *parts])
