"""The select policy of a request: which keys a decoding row reads."""

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
"""The pages that a row reads: all; the first and newest (``window``, StreamingLLM); the best by
bounds of their keys (``quest``), by representative keys (after InfLLM), or by a few dims of their
keys (``partial``, after InfiniGen). ``retrieval`` (RetrievalAttention) reads single keys of hosted
documents by a vector index. `EVICTING` policies drop keys. SnapKV keeps the prompt keys that the
end of the prompt attends to. TOVA drops the keys with the least attention of the newest token, H2O
of all tokens so far."""

EVICTING: tuple[SelectPolicy, ...] = ("snapkv", "tova", "h2o")
"""Policies that drop keys of a request's own text and free their pages."""

SCORING: tuple[SelectPolicy, ...] = ("quest", "representatives", "partial")
"""Policies that score pages, whose choice layers can share."""

GroupRule = Literal["max", "sum"]
"""The score of a page for query heads that share a KV head: the largest score, or the sum of the
heads' expected attention shares."""

LayerBudgets = Literal["flat", "pyramid"] | tuple[float, ...]
"""The distribution of a budget over layers: equal; descending linearly, to a twentieth of the mean
(PyramidKV, arXiv 2406.02069, section 4.2); or a weight for every layer of the model, with weights
of dense layers ignored."""

_DEFAULT_TOKENS = 2048
# per hosted document and query head: sink and local tokens, and about 100 hits of the index
_RETRIEVED_TOKENS = 192
# as in Quest
_DEFAULT_DENSE_LAYERS = (0, 1)
# explicit values that equal the default of policies without the field
_NEUTRAL: dict[str, tuple[object, ...]] = {"dense_layers": ((),), "dense_below": (0,)}


def share_of(ratio: float, number: int) -> int:
    """``ratio``, above 0, of ``number``, rounded up; at least 1."""
    # tolerates rounding errors: 0.07 * 100 is 7.000000000000001
    return max(1, math.ceil(ratio * number - 1e-9))


def _unused_fields(policy: SelectPolicy) -> tuple[str, ...]:
    pages = "sink", "recent", "group", "recall_every"
    if policy == "all" or policy in EVICTING:
        return (*pages, "dense_layers", "dense_below", "layer_budgets", "anchors")
    unused = {"retrieval": (*pages, "anchors"), "window": ("group", "anchors")}
    return unused.get(policy, ())


@dataclass(frozen=True)
class Select:
    """The keys that each decoding row of a request reads, selected in every layer and KV head.

    Policies select whole pages that are full and final. The newest page and recomputed tokens of
    documents are always read. A context within the budget is read in full. Evicting policies keep
    ``tokens`` keys in every layer, or the share ``ratio`` of the prompt. Raises InvalidOption for
    values out of range, and for fields that the policy does not use.

    ``tokens``
        budget as a number of tokens (default 2,048; for ``retrieval`` 192 of each document).
    ``ratio``
        budget as a share of the context.
    ``mass``
        budget as an expected share of attention, up to ``tokens`` or ``ratio`` if one is set.
    ``sink``, ``recent``
        first and last tokens, which are always read, within the budget.
    ``dense_layers``
        layers that read all keys (default 0 and 1; none for ``window`` and ``retrieval``).
    ``dense_below``
        context length up to which all keys are read. The default on a GPU is the length up to which
        that is faster for a single output, on a CPU 0.
    ``layer_budgets``
        distribution of ``tokens`` or ``ratio`` over the other layers, with an equal total.
    ``anchors``
        layers that choose pages for the layers after them, up to the next anchor with an equal
        window (Kascade, arXiv 2512.16391); dense layers are none. None is every layer, or the
        anchors of a policy file.
    ``group``
        how query heads of one KV head agree on pages.
    ``recall_every``
        n: every nth token is also read densely, to report the selected share of attention.
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
    anchors: tuple[int, ...] | None = None
    group: GroupRule = "max"
    recall_every: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        budget = [n for n in ("tokens", "ratio", "mass") if getattr(self, n) is not None]
        if self.policy == "all":
            message = f"policy 'all' reads everything: leave out {' and '.join(budget)}"
            require(not budget, message, "policy", *budget)
        require(
            self.mass is None or self.policy not in ("window", "retrieval", *EVICTING),
            f"policy {self.policy!r} does not estimate a mass: give tokens or ratio",
            *("policy", "mass", "tokens", "ratio"),
        )
        require(
            self.policy not in EVICTING or self.layer_budgets == "flat",
            f"policy {self.policy!r} keeps equally many keys in every layer, because a page has "
            "all layers of its tokens: leave out layer_budgets",
            *("policy", "layer_budgets"),
        )
        self._check_unused()
        both = self.tokens is not None and self.ratio is not None
        require(not both, "give one of tokens and ratio", "tokens", "ratio")
        require_positive(self, "tokens")
        require_share(self, "ratio", "mass")
        require_not_negative(self, "sink", "recent", "dense_below", "recall_every")
        self._check_layer_budgets()
        for name in ("dense_layers", "anchors"):
            layers = getattr(self, name) or ()
            require(
                list(layers) == sorted(set(layers)) and all(layer >= 0 for layer in layers),
                f"{name} must be ascending and at least 0, not {shown(layers)}",
                name,
            )
        require(
            self.anchors is None or self.layer_budgets == "flat",
            "layers that share a choice of pages have equal budgets: leave out layer_budgets or "
            "anchors",
            *("anchors", "layer_budgets"),
        )
        if not budget and self.policy != "all":
            tokens = _RETRIEVED_TOKENS if self.policy == "retrieval" else _DEFAULT_TOKENS
            object.__setattr__(self, "tokens", tokens)

    def _check_unused(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        unused = [
            name
            for name in _unused_fields(self.policy)
            if getattr(self, name) not in (default[name], *_NEUTRAL.get(name, ()))
        ]
        message = f"policy {self.policy!r} does not use {', '.join(unused)}: leave it out"
        require(not unused, message, "policy", *unused)

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
            "layer_budgets distribute tokens or ratio, not a mass: give one of them too, or leave "
            "out layer_budgets",
            *("mass", "tokens", "ratio", "layer_budgets"),
        )

    @property
    def layers_read_densely(self) -> tuple[int, ...]:
        """``dense_layers``, or the default of the policy."""
        if self.dense_layers is None:
            none = self.policy in ("all", "window", "retrieval", *EVICTING)
            return () if none else _DEFAULT_DENSE_LAYERS
        return self.dense_layers

    def settings(self) -> dict[str, Any]:
        """The policy and the fields that it uses, as JSON values."""
        if self.policy == "all":
            return {"policy": "all"}
        unused = _unused_fields(self.policy)
        names = [field.name for field in fields(self) if field.name not in unused]
        values = {name: getattr(self, name) for name in names}
        if "dense_layers" in values:
            values["dense_layers"] = list(self.layers_read_densely)
        for name in ("layer_budgets", "anchors"):
            if isinstance(values.get(name), tuple):
                values[name] = list(values[name])
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        names = ("tokens", "ratio", "mass")
        parts = [f"{n} {getattr(self, n):g}" for n in names if getattr(self, n) is not None]
        if isinstance(self.layer_budgets, tuple):
            parts.append("layers " + " ".join(f"{weight:g}" for weight in self.layer_budgets))
        elif self.layer_budgets != "flat":
            parts.append(self.layer_budgets)
        if self.anchors is not None:
            parts.append("anchors " + " ".join(map(str, self.anchors)))
        return ", ".join([self.policy, *parts])
