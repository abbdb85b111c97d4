"""Variables of the environment that set options, and those that others have put beside them."""

import os
import re
from collections.abc import Iterable

from looseleaf.errors import InvalidOption

PREFIX = "LOOSELEAF"
OTHER_VARIABLES = ("LOOSELEAF_CONFIG", "LOOSELEAF_KEYS", "LOOSELEAF_COMMIT")

_ADDRESS = r"(?:tcp|udp|sctp)://\S+"
_INJECTED = (
    # Kubernetes, for each service of the namespace whose name begins so
    (r"SERVICE_HOST", r"[0-9A-Fa-f.:]+|None"),
    (r"SERVICE_PORT(?:_\w+)?", r"\d+"),
    # Kubernetes, and docker for linked containers
    (r"PORT(?:_\d+_(?:TCP|UDP|SCTP))?", _ADDRESS),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_PORT", r"\d+"),
    (r"PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", r"[0-9A-Fa-f.:]+"),
    (r"NAME", r"/\S+/\S+"),
)


def leave_out_injected(options: Iterable[str]) -> None:
    """Take out of the environment what Kubernetes and docker put there for a service or a container
    called looseleaf: it describes that one, and no option of this process."""
    known = _variables(options)
    for name, value in list(os.environ.items()):
        injected = any(
            re.fullmatch(rf"{PREFIX}(?:_\w+)?_{pattern}", name) and re.fullmatch(values, value)
            for pattern, values in _INJECTED
        )
        # of the options only LOOSELEAF_PORT has such a name, and no port is an address
        if injected and (name not in known or re.fullmatch(_ADDRESS, value)):
            del os.environ[name]


def require_known(options: Iterable[str]) -> None:
    """Raises InvalidOption for a variable that looks like an option and is none."""
    known = _variables(options)
    unknown = sorted(n for n in os.environ if n.startswith(f"{PREFIX}_") and n not in known)
    if unknown:
        raise InvalidOption(
            f"unknown variable {unknown[0]}: looseleaf serve --help has all names (what Kubernetes "
            "adds for a service of a like name goes with enableServiceLinks: false)"
        )


def _variables(options: Iterable[str]) -> set[str]:
    return {f"{PREFIX}_{name.upper()}" for name in options} | set(OTHER_VARIABLES)
