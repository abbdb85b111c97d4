"""Arms of a distance: how the documents of a prompt are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from looseleaf.config import Fuse
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import DocumentContext
from looseleaf_lab.evals.distance.ceiling import CEILINGS, Ceiling

SHARE = 0.15
"""The default share of document tokens that a policy computes again."""


@dataclass(frozen=True)
class DistanceArm:
    """How a prompt's documents are computed. With ``primes`` the prefix cache has the first
    document of each prompt, as another prompt left it. Arms that are ``exact`` equal full prefill
    by law. With a ``ceiling`` full knowledge chooses the tokens, as many as those of ``fuse``. In
    ``primed`` arms documents are computed behind the primer of the measurement."""

    name: str
    context: DocumentContext = "lead"
    fuse: Fuse | None = None
    has_documents: bool = True
    primes: bool = False
    exact: bool = False
    ceiling: Ceiling | None = None
    primed: bool = False


FULL = DistanceArm("full", "prompt", exact=True)
REUSE = DistanceArm("reuse")
_PLAIN = (
    DistanceArm("none", has_documents=False),
    FULL,
    DistanceArm("prefix", "prompt", primes=True, exact=True),
    REUSE,
    DistanceArm("alone", "alone"),
)
PLAIN: Mapping[str, DistanceArm] = MappingProxyType({arm.name: arm for arm in _PLAIN})
"""Arms without a fuse policy, by name."""


def of_policy(fuse: Fuse) -> DistanceArm:
    """The arm of a fuse policy."""
    settings: list[str] = [fuse.selector]
    if fuse.selector == "deviation":
        settings.append("layer " + " ".join(map(str, fuse.check_layers)))
    if fuse.watched_share != Fuse.watched_share:
        settings.append(f"last {fuse.watched_share:.0%} of layers")
    if fuse.ratio is not None:
        settings.append(f"{fuse.ratio:g}")
    if fuse.tokens is not None:
        settings.append(f"{fuse.tokens} tokens")
    exact = fuse.selector == "all"
    return DistanceArm(", ".join(settings), fuse=fuse, exact=exact)


def with_primer(arm: DistanceArm) -> DistanceArm:
    """The same arm over documents that are computed behind a primer."""
    name = "primer" if arm == REUSE else f"primer, {arm.name}"
    return replace(arm, name=name, primed=True)


def of_ceilings(shares: Sequence[float]) -> list[DistanceArm]:
    """The arms whose tokens full knowledge chooses, at these shares."""
    return [
        DistanceArm(f"ceiling {name}, {share:g}", fuse=Fuse("random", ratio=share), ceiling=name)
        for name in CEILINGS
        for share in shares
    ]


def default_policies(num_layers: int) -> list[Fuse]:
    """APE, and every selector at its default share; deviation at layer 2 and at a quarter of the
    depth."""
    layers = sorted({min(2, num_layers - 1), max(1, num_layers // 4)})
    return [
        Fuse("ape"),
        Fuse("first", ratio=SHARE),
        Fuse("question", ratio=SHARE),
        *(Fuse("deviation", ratio=SHARE, check_layers=(layer,)) for layer in layers),
        Fuse("links", ratio=SHARE),
    ]


def choose_arms(
    names: Sequence[str],
    fuses: Sequence[Fuse],
    num_layers: int,
    ceilings: Sequence[float] = (),
    *,
    primed: bool = False,
) -> list[DistanceArm]:
    """The arms of these names, policies and shares of ceilings, by default those of all names and
    default policies; ``full`` is first, then ``reuse``. With ``primed`` reuse and every policy
    but APE are measured behind a primer, too.

    Raises InvalidOption for an unknown name."""
    unknown = [name for name in names if name not in PLAIN]
    if unknown:
        raise InvalidOption(f"unknown arm {unknown[0]!r}: with --measure use {', '.join(PLAIN)}")
    policies = [of_policy(fuse) for fuse in fuses]
    if not (names or fuses or ceilings):
        policies = [of_policy(fuse) for fuse in default_policies(num_layers)]
        names = tuple(PLAIN)
    # APE gives all documents one position, as they are computed without a primer
    behind = [REUSE, *(arm for arm in policies if arm.fuse and arm.fuse.selector != "ape")]
    primers = [with_primer(arm) for arm in behind if primed and not arm.exact]
    chosen_arms = [*(PLAIN[name] for name in names), *policies, *primers, *of_ceilings(ceilings)]
    return list(dict.fromkeys([FULL, REUSE, *chosen_arms]))
