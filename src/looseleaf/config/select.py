"""The select policy of a request: which of the keys before it a decoding row reads."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from looseleaf.config.option import (
    require,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
    shown,
)

SelectPolicy = Literal[
    "all", "window", "quest", "representatives", "partial", "retrieval", "snapkv", "tova", "h2o"
]
"""Which pages are read: all; the first and the newest (StreamingLLM); those whose bounds promise
most (Quest); those whose representative keys do (after InfLLM); those that a few dims of their
keys speak for (after InfiniGen); of hosted documents those that a vector index finds
(RetrievalAttention), key by key. Or keys are thrown away (`EVICTING`): of the prompt all but those
that its end attends to (SnapKV); what the newest token attends to least (TOVA), or all tokens so
far together (H2O)."""

EVICTING: tuple[SelectPolicy, ...] = ("snapkv", "tova", "h2o")
"""Policies that throw keys of a request's own text away, and give the pages back."""

GroupRule = Literal["max", "sum"]
"""How query heads that share a KV head agree: a page is worth its largest score, or the sum of the
shares of attention that each of them expects of it."""

LayerBudgets = Literal["flat", "pyramid"] | tuple[float, ...]
"""How a budget is spread over layers: the same in each; falling from the first to the last, to a
twentieth of the mean (PyramidKV, arXiv 2406.02069, section 4.2); or by a weight for every layer of
the model, of which those of dense layers count for nothing."""

_DEFAULT_TOKENS = 2048
# of each hosted document and query head: the ends that are always read, and about 100 by the index
_RETRIEVED_TOKENS = 192
# the first two layers attend to everything, as Quest has it
_DEFAULT_DENSE_LAYERS = (0, 1)
# what says no more of a field than leaving it out, where it is not heeded
_NOTHING: dict[str, tuple[object, ...]] = {"dense_layers": ((),), "dense_below": (0,)}


def share_of(ratio: float, number: int) -> int:
    """The share ``ratio``, above 0, of so many tokens or pages, rounded up."""
    # 0.07 * 100 is 7.000…1: what is a whole number but for rounding counts as one
    return max(1, math.ceil(ratio * number - 1e-9))


def _heedless(policy: SelectPolicy) -> tuple[str, ...]:
    """The fields that mean nothing to a policy."""
    pages = "sink", "recent", "group", "recall_every"
    if policy == "all" or policy in EVICTING:
        return (*pages, "dense_layers", "dense_below", "layer_budgets")
    return {"retrieval": pages, "window": ("group",)}.get(policy, ())


@dataclass(frozen=True)
class Select:
    """Which keys each decoding row of a request reads, chosen anew in every layer and KV head.

    Whole pages are chosen, of those that are full and final; a row's newest page is always read, as
    is what it computed again of documents. How many: ``tokens`` (default 2,048), or ``ratio``, a
    share of the context; or ``mass``, the share of attention that the pages are expected to hold,
    then as few as will do, and no more than ``tokens`` or ``ratio`` if one is given too. The first
    ``sink`` and the last ``recent`` tokens are read in any case, within the budget. All is read in
    ``dense_layers`` (default 0 and 1, none for ``window``), while the context has at most
    ``dense_below`` tokens (left out: on a GPU as long as that is faster for a single output, on a
    CPU 0), and where it fits into the budget. ``layer_budgets`` spread ``tokens`` or ``ratio`` over
    the other layers, which together get what they would get if it were the same in each (see
    `LayerBudgets`). ``group`` is how query heads of one KV head agree. With
    ``recall_every`` n, every nth token is read densely as well, to report which share of the
    attention the choice held. Policies that throw keys away keep ``tokens`` of them in every layer,
    or the share ``ratio`` of the prompt's. What a policy would not heed is refused. Raises
    InvalidOption.
    """

    policy: SelectPolicy = "quest"
    tokens: int | None = None
    ratio: float | None = None
    mass: float | None = None
    sink: int = 4
    recent: int = 16
    dense_layers: tuple[int, ...] | None = None
    dense_below: int | None = None
    layer_budgets: LayerBudgets = "flat"
    group: GroupRule = "max"
    recall_every: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        budget = [n for n in ("tokens", "ratio", "mass") if getattr(self, n) is not None]
        if self.policy == "all":
            told = f"policy 'all' reads everything: leave out {' and '.join(budget)}"
            require(not budget, told, "policy", *budget)
        require(
            self.policy != "window" or self.mass is None,
            "policy 'window' looks at no key, so it can't tell its mass: give tokens or ratio",
            *("policy", "mass", "tokens", "ratio"),
        )
        require(
            self.policy != "retrieval" or self.mass is None,
            "policy 'retrieval' can't tell the mass of keys that it does not look at: give tokens "
            "or ratio",
            *("policy", "mass", "tokens", "ratio"),
        )
        require(
            self.policy not in EVICTING or "mass" not in budget,
            f"policy {self.policy!r} keeps a number of keys: give tokens or ratio, not a mass",
            *("policy", "mass", "tokens", "ratio"),
        )
        require(
            self.policy not in EVICTING or self.layer_budgets == "flat",
            f"policy {self.policy!r} keeps as many keys in every layer, since a page holds all "
            "layers of its tokens and goes when none of them needs it: leave out layer_budgets",
            *("policy", "layer_budgets"),
        )
        self._check_heeded()
        both = self.tokens is not None and self.ratio is not None
        require(not both, "give one of tokens and ratio", "tokens", "ratio")
        require_positive(self, "tokens")
        require_share(self, "ratio", "mass")
        require_not_negative(self, "sink", "recent", "dense_below", "recall_every")
        self._check_layer_budgets()
        layers = self.dense_layers or ()
        require(
            list(layers) == sorted(set(layers)) and all(layer >= 0 for layer in layers),
            f"dense_layers must rise and begin at 0 or later, not {shown(layers)}",
            "dense_layers",
        )
        if not budget and self.policy != "all":
            least = self.policy == "retrieval"
            object.__setattr__(self, "tokens", _RETRIEVED_TOKENS if least else _DEFAULT_TOKENS)

    def _check_heeded(self) -> None:
        """Raise InvalidOption for what is given besides a budget and has no meaning here."""
        default = {field.name: field.default for field in fields(self)}
        given = [
            name
            for name in _heedless(self.policy)
            if getattr(self, name) not in (default[name], *_NOTHING.get(name, ()))
        ]
        told = f"policy {self.policy!r} does not heed {', '.join(given)}: leave it out"
        require(not given, told, "policy", *given)

    def _check_layer_budgets(self) -> None:
        budgets = self.layer_budgets
        if budgets == "flat":
            return
        require(
            budgets == "pyramid" or (isinstance(budgets, tuple) and len(budgets) > 0),
            "layer_budgets must be 'flat', 'pyramid' or a weight for every layer, not "
            f"{shown(budgets)}",
            "layer_budgets",
        )
        require(
            isinstance(budgets, str) or all(0 < weight < math.inf for weight in budgets),
            f"layer_budgets must be positive weights, not {shown(budgets)}",
            "layer_budgets",
        )
        require(
            self.mass is None or self.tokens is not None or self.ratio is not None,
            "a mass is found anew in every layer, so there is nothing to spread over them: give "
            "tokens or ratio too, or leave out layer_budgets",
            *("mass", "tokens", "ratio", "layer_budgets"),
        )

    @property
    def layers_read_densely(self) -> tuple[int, ...]:
        """``dense_layers``, or what the policy has by default."""
        if self.dense_layers is None:
            none = self.policy in ("all", "window", "retrieval", *EVICTING)
            return () if none else _DEFAULT_DENSE_LAYERS
        return self.dense_layers

    def settings(self) -> dict[str, Any]:
        """The policy and all that it takes of the other fields, as plain values."""
        if self.policy == "all":
            return {"policy": "all"}
        heedless = _heedless(self.policy)
        known = [field.name for field in fields(self) if field.name not in heedless]
        named = {name: getattr(self, name) for name in known}
        if "dense_layers" in named:
            named["dense_layers"] = list(self.layers_read_densely)
        if isinstance(self.layer_budgets, tuple):
            named["layer_budgets"] = list(self.layer_budgets)
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        names = ("tokens", "ratio", "mass")
        given = [f"{n} {getattr(self, n):g}" for n in names if getattr(self, n) is not None]
        if self.layer_budgets != "flat":
            budgets = self.layer_budgets
            named = budgets if isinstance(budgets, str) else " ".join(f"{w:g}" for w in budgets)
            given.append(named if named == "pyramid" else f"layers {named}")
        return ", ".join([self.policy, *given])
