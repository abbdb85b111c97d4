"""The configuration of the proxy in front of several servers."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import option, require, require_kinds, require_positive


@dataclass(frozen=True)
class RouteConfig:
    """The configuration of ``looseleaf route``. Raises InvalidOption for values out of range."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8080, "port to listen at; 0: a free port")
    load_factor: float = option(
        1.25, "most load of a replica, as a multiple of the mean; a hot document gets more replicas"
    )
    load_slack: int = option(4, "requests in flight up to which a replica is never avoided")
    load_half_life: float = option(60.0, "time in which the weight of a past request halves (s)")
    requests_per_minute: int | None = option(
        None, "most requests per minute of one key, over all replicas"
    )
    concurrent_requests: int | None = option(
        None, "most concurrent requests of one key, over all replicas"
    )
    max_connections: int = option(
        8192,
        "most open connections of clients, or fewer if the process has fewer descriptors; idle "
        "ones are closed first",
    )
    max_body_mib: float = option(64.0, "largest request body in MiB")
    registered_mib: float = option(
        256.0,
        "memory for registered documents that are sent again to replicas without them, in MiB",
    )
    connect_seconds: float = option(2.0, "longest wait for a connection to a replica (s)")
    silence_seconds: float = option(
        660.0, "longest silence of a replica within an answer, above the servers' deadline (s)"
    )
    drain_seconds: float = option(600.0, "time limit of running requests at shutdown (s)")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe events of the log"
    )
    log_format: Literal["json", "console"] = option("json", "form of the log's lines")

    def __post_init__(self) -> None:
        require_kinds(self)
        require_positive(
            self,
            *("load_slack", "load_half_life", "requests_per_minute", "concurrent_requests"),
            *("max_connections", "max_body_mib"),
            *("connect_seconds", "silence_seconds", "drain_seconds"),
        )
        require(self.load_factor >= 1, "load_factor must be at least 1", "load_factor")
        require(0 <= self.port < 65536, "port must be from 0 to 65535", "port")
        require(self.registered_mib >= 0, "registered_mib must be 0 or more", "registered_mib")
