"""``--fuse`` and ``--ratio``: which tokens of reused documents are computed again; ``--select`` and
``--budget``: which keys an answer reads; ``--revise``: which of its tokens read on."""

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
    """A whole number is so many tokens, a fraction a share: so 1.0 is not 1."""
    return int(text) if text.strip().lstrip("+-").isdecimal() else float(text)


BUDGET_HELP = (
    "what --select may read: a whole number is so many tokens, a fraction (0.05, 1.0) a share of "
    "the context [default: 2048; of each hosted document 192]. Layers that read everything come "
    "on top: by default the first 2, none with window, retrieval and where keys are thrown away"
)
_LAYERS = ("flat", "pyramid")
_FUSE_FLAGS = {
    **{"selector": "--fuse", "ratio": "--ratio", "check_layers": "--check-layer"},
    "watched_share": "--watched-share",
}
_SELECT_FLAGS = {
    **{"policy": "--select", "tokens": "--budget", "ratio": "--budget", "window": "--revise"},
    "layer_budgets": "--layer-budgets",
}
_WITHOUT_RATIO = ("none", "all", "ape")
_WITH_RATIO = tuple(name for name in get_args(FuseSelector) if name not in _WITHOUT_RATIO)
# these look at keys, so a newer token may find what an older one missed
_PAGED: tuple[SelectPolicy, ...] = ("quest", "representatives", "partial")
_REVISED: tuple[SelectPolicy, ...] = (*_PAGED, "retrieval")


def fuse_options(*, several: bool) -> Callable[[Command], Command]:
    """Adds both flags; with ``several`` each may be repeated. `take_fuses` reads them."""

    def add(command: Command) -> Command:
        again = "; may be repeated" if several else ""
        ratio = click.option(
            "--ratio",
            "ratios",
            type=float,
            multiple=True,
            help=f"share of the documents' tokens to compute again [default: 0.15]{again}",
        )
        fuse = click.option(
            "--fuse",
            "selectors",
            type=click.Choice(get_args(EvaluatedSelector if several else FuseSelector)),
            multiple=True,
            help=f"which tokens of reused documents are computed again [default: none]{again}",
        )
        return fuse(ratio(_layer_options(command) if several else command))

    return add


def _layer_options(command: Command) -> Command:
    """Adds the flags that say at which layers a selector looks."""
    watched = click.option(
        "--watched-share",
        "watched_shares",
        type=float,
        multiple=True,
        help="share of the layers, the last ones, whose attention --fuse question and links go by "
        "[default: 0.25]; may be repeated",
    )
    checked = click.option(
        "--check-layer",
        "check_layers",
        type=int,
        multiple=True,
        help="the layer at which --fuse deviation chooses, from 1 [default: 2]; may be repeated",
    )
    return watched(checked(command))


def take_fuses(options: dict[str, Any]) -> list[Fuse]:
    """The policies that the flags ask for, every selector at every ratio and, if it looks at
    layers, at each of these; takes the flags out of ``options``.
    """
    selectors: Sequence[EvaluatedSelector] = options.pop("selectors")
    ratios: Sequence[float | None] = options.pop("ratios")
    shares: Sequence[float] = options.pop("watched_shares", ())
    layers: Sequence[int] = options.pop("check_layers", ())
    free = [s for s in selectors if s not in _WITHOUT_RATIO]
    if ratios and not free:
        raise InvalidOption(f"--ratio needs a --fuse that chooses by it: {', '.join(_WITH_RATIO)}")
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
                own = ratios if selector in free else ()
                # a default in tokens gives way to the ratio
                fuses += [replace(kind, ratio=ratio, tokens=None) for ratio in own] or [kind]
    return fuses


def take_fuse(options: dict[str, Any]) -> Fuse | None:
    """The one policy that the flags ask for, None without them."""
    fuses = take_fuses(options)
    if len(fuses) > 1:
        raise InvalidOption("one question has one policy: give --fuse and --ratio once")
    return fuses[0] if fuses else None


def select_options(command: Command) -> Command:
    """Adds ``--select``, ``--budget``, ``--layer-budgets`` and ``--revise``. `take_select` and
    `take_revise` read them."""
    revise = click.option(
        "--revise",
        type=click.IntRange(1, MAX_WINDOW),
        help="how many of the last tokens go on to read with the newest; needs --select "
        "[default: 1]",
    )
    budget = click.option("--budget", type=_budget, metavar="NUMBER", help=BUDGET_HELP)
    layers = click.option(
        "--layer-budgets",
        type=click.Choice(_LAYERS),
        help="how --budget is spread over layers: flat, or falling from the first to the last "
        "[default: flat]",
    )
    policy = click.option(
        "--select",
        "policy",
        type=click.Choice(get_args(SelectPolicy)),
        help="which keys each token of the answer reads [default: all]",
    )
    return policy(budget(layers(revise(command))))


def take_revise(options: dict[str, Any]) -> Revise | None:
    """The window that the flag asks for, None without it; takes it out of ``options``."""
    window = options.pop("revise")
    return None if window is None else Revise(window)


def reading_options(command: Command) -> Command:
    """Adds ``--select``, ``--budget``, ``--layer-budgets`` and ``--revise``, each of which may be
    repeated, and ``--every-layer``. `take_readings` reads them."""
    options = (
        click.option(
            "--select",
            "policies",
            type=click.Choice(get_args(SelectPolicy)),
            multiple=True,
            help="which keys each token of the answer reads; may be repeated",
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
            help="how --budget is spread over layers: flat, or falling from the first to the last "
            "[default: flat]; may be repeated",
        ),
        click.option(
            "--revise",
            "windows",
            type=int,
            multiple=True,
            help=f"rows that are revised by what {', '.join(_REVISED)} read; may be repeated",
        ),
        click.option("--every-layer", is_flag=True, help="--select leaves no layer dense"),
        click.option(
            "--stale",
            is_flag=True,
            help="--revise also without reading anew what earlier rows read of pages that change",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class Reading:
    """A way to read less: a policy that chooses pages, with rows that are revised or without, or
    (``select`` None) one that throws keys away and keeps ``budget``."""

    policy: SelectPolicy
    budget: float
    select: Select | None
    revise: Revise | None = None


def take_readings(options: dict[str, Any]) -> list[Reading]:
    """Every policy at every budget, spread in every way, by itself and, if it chooses pages by
    their keys, under every window; takes the flags out of ``options``."""
    policies, budgets, windows = (options.pop(n) for n in ("policies", "budgets", "windows"))
    layers = () if options.pop("every_layer") else None
    spreads = options.pop("spreads") or (None,)
    ways: tuple[Local, ...] = ("exact", "stale") if options.pop("stale") else ("exact",)
    if (budgets or windows or any(spreads)) and not policies:
        raise InvalidOption(
            "--budget, --layer-budgets and --revise need a --select that they are for"
        )
    if layers is not None and not policies:
        raise InvalidOption("--every-layer needs a --select")
    if len(ways) > 1 and not (windows and any(policy in _PAGED for policy in policies)):
        raise InvalidOption(f"--stale needs a --revise of {', '.join(_PAGED)}")
    if windows and not any(policy in _REVISED for policy in policies):
        raise InvalidOption(f"--revise needs a --select that looks at keys: {', '.join(_REVISED)}")
    readings = []
    for budget, policy, spread in product(budgets or (None,), policies, spreads):
        asked = {"policy": policy, "budget": None, "layer_budgets": spread}
        if policy in EVICTING:
            select = take_select(asked)
            assert select is not None and select.tokens is not None
            readings.append(Reading(policy, budget or select.tokens, None))
        else:
            select = take_select({**asked, "budget": budget})
            assert select is not None
            if policy in _PAGED:
                # what is asked for is how good the choice is
                select = replace(select, dense_below=0)
            if layers is not None:
                select = replace(select, dense_layers=layers)
            local_parts = ways if policy in _PAGED else ways[:1]
            pairs = product(windows if policy in _REVISED else (), local_parts)
            with names_in_errors(_SELECT_FLAGS):
                revises = [Revise(window, local=local) for window, local in pairs]
            readings += [Reading(policy, budget or 0, select, r) for r in (None, *revises)]
    return readings


def take_select(options: dict[str, Any]) -> Select | None:
    """The policy that the flags ask for, None without them; takes them out of ``options``."""
    policy, budget, layers = (options.pop(n) for n in ("policy", "budget", "layer_budgets"))
    if policy is None:
        if budget is not None or layers is not None:
            raise InvalidOption("--budget and --layer-budgets need a --select that chooses by them")
        return None
    spread: dict[str, Any] = {} if layers is None else {"layer_budgets": layers}
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
