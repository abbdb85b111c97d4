"""Environment variables: those that set options, and those injected by container runtimes."""

import os
import re
from collections.abc import Iterable

from looseleaf.errors import InvalidOption

PREFIX = "LOOSELEAF"
OTHER_VARIABLES = (
    "LOOSELEAF_CONFIG",
    "LOOSELEAF_KEYS",
    "LOOSELEAF_COMMIT",
    "LOOSELEAF_REPLICA_KEY",
)

_ADDRESS = r"(?:tcp|udp|sctp)://\S+"
_INJECTED = (
    # Kubernetes, for each service of the namespace with this prefix
    (r"SERVICE_HOST", r"[0-9A-Fa-f.:]+|None"),
    (r"SERVICE_PORT(?:_\w+)?", r"\d+"),
    # Kubernetes, and docker for linked containers
    (r"PORT(?:_\d+_(?:TCP|UDP|SCTP))?", _ADDRESS),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_PORT", r"\d+"),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", r"[0-9A-Fa-f.:]+"),
    (r"NAME", r"/\S+/\S+"),
)


def remove_injected(options: Iterable[str]) -> None:
    """Delete variables that Kubernetes or docker inject for a service or container named looseleaf.

    They describe that service, not options of this process."""
    known = _variables(options)
    for name, value in list(os.environ.items()):
        injected = any(
            re.fullmatch(rf"{PREFIX}(?:_\w+)?_{pattern}", name) and re.fullmatch(values, value)
            for pattern, values in _INJECTED
        )
        # only LOOSELEAF_PORT is both, and an address is no valid port
        if injected and (name not in known or re.fullmatch(_ADDRESS, value)):
            del os.environ[name]


def require_known(options: Iterable[str]) -> None:
    """Raise InvalidOption for a variable with the prefix that is not an option."""
    known = _variables(options)
    unknown = sorted(n for n in os.environ if n.startswith(f"{PREFIX}_") and n not in known)
    if unknown:
        raise InvalidOption(
            f"unknown variable {unknown[0]}: looseleaf serve --help lists all options "
            "(enableServiceLinks: false removes the variables of Kubernetes services)"
        )


def _variables(options: Iterable[str]) -> set[str]:
    return {f"{PREFIX}_{name.upper()}" for name in options} | set(OTHER_VARIABLES)
