"""Command-line flags of policies: ``--fuse``, ``--select``, ``--revise``, and their parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar, get_args

import click

from looseleaf.cli.options import names_in_errors
from looseleaf.config import (
    EVICTING,
    MAX_WINDOW,
    SCORING,
    EvaluatedSelector,
    Fuse,
    FuseSelector,
    Local,
    Revise,
    Select,
    SelectPolicy,
)
from looseleaf.errors import InvalidOption

Command = TypeVar("Command", bound=Callable[..., Any])


def _budget(text: str) -> int | float:
    """A number of tokens (int) or a share (float): "1" is a token, "1.0" everything."""
    try:
        return int(text) if text.strip().lstrip("+-").isdecimal() else float(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a number") from error


BUDGET_HELP = (
    "budget of --select: a whole number of tokens, or a fraction (0.05, 1.0) of the context "
    "[default: 2048; 192 of each hosted document]. Dense layers read everything in addition: by "
    "default the first 2, none with window, retrieval and evicting policies"
)
_LAYERS = ("flat", "pyramid")
_ANCHORS_HELP = (
    "layers whose choice of pages serves the layers after them, as 2,6,10 [default: every layer "
    "chooses, or the anchors of --policy]"
)


def _anchors(text: str) -> tuple[int, ...]:
    """Layers, separated by commas."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of layers, as 2,6,10") from error


_FUSE_FLAGS = {
    **{"selector": "--fuse", "ratio": "--ratio", "check_layers": "--check-layer"},
    "watched_share": "--watched-share",
}
_SELECT_FLAGS = {
    **{"policy": "--select", "tokens": "--budget", "ratio": "--budget", "window": "--revise"},
    "layer_budgets": "--layer-budgets",
    "anchors": "--anchors",
}
_WITHOUT_RATIO = ("none", "all", "ape")
_WITH_RATIO = tuple(name for name in get_args(FuseSelector) if name not in _WITHOUT_RATIO)
# policies that score keys, so a newer row may select keys that an older row missed
_REVISED: tuple[SelectPolicy, ...] = (*SCORING, "retrieval")


def fuse_options(*, several: bool) -> Callable[[Command], Command]:
    """Add ``--fuse`` and ``--ratio``, repeatable with ``several``, for `take_fuses`."""

    def add(command: Command) -> Command:
        again = "; may be repeated" if several else ""
        ratio = click.option(
            "--ratio",
            "ratios",
            type=float,
            multiple=True,
            help=f"share of the documents' tokens to recompute [default: 0.15]{again}",
        )
        fuse = click.option(
            "--fuse",
            "selectors",
            type=click.Choice(get_args(EvaluatedSelector if several else FuseSelector)),
            multiple=True,
            help=f"tokens of reused documents to recompute [default: none]{again}",
        )
        return fuse(ratio(_layer_options(command) if several else command))

    return add


def _layer_options(command: Command) -> Command:
    """Add the flags for the layers of selectors."""
    watched = click.option(
        "--watched-share",
        "watched_shares",
        type=float,
        multiple=True,
        help="share of the layers, the last ones, whose attention --fuse question and links use "
        "[default: 0.25]; may be repeated",
    )
    checked = click.option(
        "--check-layer",
        "check_layers",
        type=int,
        multiple=True,
        help="layer at which --fuse deviation selects, from 1 [default: 2]; may be repeated",
    )
    return watched(checked(command))


def take_fuses(options: dict[str, Any]) -> list[Fuse]:
    """The policies of the flags: every selector with every ratio and every value of its layer flag.

    Removes the flags from ``options``. Raises InvalidOption for flags without their selector.
    """
    selectors: Sequence[EvaluatedSelector] = options.pop("selectors")
    ratios: Sequence[float | None] = options.pop("ratios")
    shares: Sequence[float] = options.pop("watched_shares", ())
    layers: Sequence[int] = options.pop("check_layers", ())
    with_ratio = [s for s in selectors if s not in _WITHOUT_RATIO]
    if ratios and not with_ratio:
        raise InvalidOption(f"--ratio needs a --fuse with a ratio: {', '.join(_WITH_RATIO)}")
    if shares and not {"question", "links"}.intersection(selectors):
        raise InvalidOption("--watched-share is for --fuse question and links")
    if layers and "deviation" not in selectors:
        raise InvalidOption("--check-layer is for --fuse deviation")
    fuses = []
    with names_in_errors(_FUSE_FLAGS):
        for selector in selectors:
            kinds = [Fuse(selector)]
            if shares and selector in ("question", "links"):
                kinds = [replace(kinds[0], watched_share=share) for share in shares]
            elif layers and selector == "deviation":
                kinds = [replace(kinds[0], check_layers=(layer,)) for layer in layers]
            for kind in kinds:
                # the ratio replaces a default in tokens
                fuses += [
                    replace(kind, ratio=ratio, tokens=None)
                    for ratio in (ratios if selector in with_ratio else ())
                ] or [kind]
    return fuses


def take_fuse(options: dict[str, Any]) -> Fuse | None:
    """The policy of the flags, None without flags; removes them from ``options``."""
    fuses = take_fuses(options)
    if len(fuses) > 1:
        raise InvalidOption("a question has one policy: give --fuse and --ratio once")
    return fuses[0] if fuses else None


def select_options(command: Command) -> Command:
    """Add ``--select``, ``--budget``, ``--layer-budgets``, ``--anchors`` and ``--revise``, for
    `take_select` and `take_revise`."""
    revise = click.option(
        "--revise",
        type=click.IntRange(1, MAX_WINDOW),
        help="number of last tokens that are revised by keys of the newest; needs --select "
        "[default: 1]",
    )
    budget = click.option("--budget", type=_budget, metavar="NUMBER", help=BUDGET_HELP)
    layers = click.option(
        "--layer-budgets",
        type=click.Choice(_LAYERS),
        help="distribution of --budget over layers: equal (flat), or descending (pyramid) "
        "[default: flat]",
    )
    policy = click.option(
        "--select",
        "select_policy",
        type=click.Choice(get_args(SelectPolicy)),
        help="keys that each token of the answer reads [default: all]",
    )
    anchors = click.option("--anchors", type=_anchors, metavar="LAYERS", help=_ANCHORS_HELP)
    return policy(budget(layers(anchors(revise(command)))))


def take_revise(options: dict[str, Any]) -> Revise | None:
    """The policy of ``--revise``, None without it; removes the flag from ``options``."""
    window = options.pop("revise")
    return None if window is None else Revise(window)


def reading_options(command: Command) -> Command:
    """Add repeatable ``--select``, ``--budget``, ``--layer-budgets``, ``--anchors`` and
    ``--revise``, and ``--every-layer`` and ``--stale``, for `take_readings`."""
    options = (
        click.option(
            "--select",
            "policies",
            type=click.Choice(get_args(SelectPolicy)),
            multiple=True,
            help="keys that each token of the answer reads; may be repeated",
        ),
        click.option(
            "--budget",
            "budgets",
            type=_budget,
            metavar="NUMBER",
            multiple=True,
            help=f"{BUDGET_HELP}; may be repeated",
        ),
        click.option(
            "--layer-budgets",
            "spreads",
            type=click.Choice(_LAYERS),
            multiple=True,
            help="distribution of --budget over layers: equal (flat), or descending (pyramid) "
            "[default: flat]; may be repeated",
        ),
        click.option(
            "--revise",
            "windows",
            type=int,
            multiple=True,
            help=f"rows that are revised by keys of {', '.join(_REVISED)}; may be repeated",
        ),
        click.option(
            "--anchors",
            "anchors",
            type=_anchors,
            metavar="LAYERS",
            multiple=True,
            help=f"{_ANCHORS_HELP}; may be repeated, and each arm runs without them, too",
        ),
        click.option("--every-layer", is_flag=True, help="apply --select in every layer"),
        click.option(
            "--stale",
            is_flag=True,
            help="measure --revise also without renewed reads of pages that are written to",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class Reading:
    """A selection to evaluate: ``select`` with an optional ``revise``, or, if ``select`` is None,
    an evicting ``policy`` that keeps ``budget``."""

    policy: SelectPolicy
    budget: float
    select: Select | None
    revise: Revise | None = None


def take_readings(options: dict[str, Any]) -> list[Reading]:
    """The product of policies, budgets and layer budgets, each without and with every window, and
    with the anchors.

    Windows and anchors apply to policies that score keys. Removes the flags from ``options``."""
    policies, budgets, windows = (options.pop(n) for n in ("policies", "budgets", "windows"))
    layers = () if options.pop("every_layer") else None
    spreads, anchors = options.pop("spreads") or (None,), options.pop("anchors")
    locals_: tuple[Local, ...] = ("exact", "stale") if options.pop("stale") else ("exact",)
    if (budgets or windows or any(spreads)) and not policies:
        raise InvalidOption("--budget, --layer-budgets and --revise need a --select")
    if anchors and not any(policy in SCORING for policy in policies):
        raise InvalidOption(f"--anchors need a --select that scores pages: {', '.join(SCORING)}")
    if layers is not None and not policies:
        raise InvalidOption("--every-layer needs a --select")
    if len(locals_) > 1 and not (windows and any(policy in SCORING for policy in policies)):
        raise InvalidOption(f"--stale needs a --revise of {', '.join(SCORING)}")
    if windows and not any(policy in _REVISED for policy in policies):
        raise InvalidOption(f"--revise needs a --select that scores keys: {', '.join(_REVISED)}")
    readings = []
    for budget, policy, spread in product(budgets or (None,), policies, spreads):
        flags = {
            "select_policy": policy, "budget": None, "layer_budgets": spread, "anchors": None,
        }  # fmt: skip
        if policy in EVICTING:
            select = take_select(flags)
            assert select is not None and select.tokens is not None
            readings.append(Reading(policy, budget or select.tokens, None))
            continue
        select = take_select({**flags, "budget": budget})
        assert select is not None
        if policy in SCORING:
            # measures the selection also where dense reads would be faster
            select = replace(select, dense_below=0)
        if layers is not None:
            select = replace(select, dense_layers=layers)
        pairs = product(
            windows if policy in _REVISED else (), locals_ if policy in SCORING else locals_[:1]
        )
        with names_in_errors(_SELECT_FLAGS):
            revises = [Revise(window, local=local) for window, local in pairs]
            shared = anchors if policy in SCORING and spread in (None, "flat") else ()
            anchored = [replace(select, anchors=layers) for layers in shared]
        readings += [Reading(policy, budget or 0, select, r) for r in (None, *revises)]
        readings += [Reading(policy, budget or 0, each) for each in anchored]
    return readings


def take_select(options: dict[str, Any]) -> Select | None:
    """The policy of the flags, None without ``--select``; removes them from ``options``."""
    names = "select_policy", "budget", "layer_budgets", "anchors"
    policy, budget, layers, anchors = (options.pop(name) for name in names)
    if policy is None:
        if any(value is not None for value in (budget, layers, anchors)):
            raise InvalidOption("--budget, --layer-budgets and --anchors need a --select: give one")
        return None
    spread: dict[str, Any] = {} if layers is None else {"layer_budgets": layers}
    spread |= {} if anchors is None else {"anchors": anchors}
    if budget is None:
        return _select(policy, **spread)
    if not 0 < budget < math.inf:
        raise InvalidOption(f"--budget is a number of tokens, or a share up to 1.0, not {budget:g}")
    if isinstance(budget, float) and budget <= 1:
        return _select(policy, ratio=budget, **spread)
    if budget != int(budget):
        raise InvalidOption(f"--budget {budget} is neither a whole number nor a share up to 1.0")
    return _select(policy, tokens=int(budget), **spread)


def _select(policy: SelectPolicy, **fields: Any) -> Select:
    with names_in_errors(_SELECT_FLAGS):
        return Select(policy, **fields)
