"""How the HTTP server is reached, and what it allows."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_each,
    require_kinds,
    require_positive,
    shown,
)


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP server is reached, whom it answers, and how much each may ask of it."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0 takes a free one")
    served_model_name: str | None = option(
        None, "name of the model for clients; default: as the checkpoint is named"
    )
    system_prompt: tuple[str, ...] = option(
        (),
        "[NAME=]FILE: text that is read before every chat, computed once; with NAME, for a model "
        "of that name beside the plain one; may be repeated",
    )
    generation_config: bool = option(
        True,
        "take temperature, top_p and the like from the model's generation_config.json where "
        "a request leaves them out",
    )
    document_template: str | None = option(
        None,
        "a document's text from {title} and {text}; a line with {title} is left out where there is "
        "no title; default: '{text}', after a line with the title if the model has no form for "
        "documents",
    )
    api_keys: str | None = option(
        None,
        "file of lines TENANT=KEY; tenants share nothing; LOOSELEAF_KEYS may hold them as well",
    )
    strict_permissions: bool = option(
        False,
        "refuse a file of API keys that users other than its owner can read or change; without "
        "this, the log warns of it",
    )
    open_loopback: bool = option(
        True, "where there are no keys, answer everybody on this machine, and nobody else"
    )
    open_metrics: bool = option(False, "give /metrics to callers without a key")
    operator: str = option("operator", "the tenant whose keys may read /metrics")
    requests_per_minute: int | None = option(None, "most requests of one key in a minute")
    concurrent_requests: int | None = option(None, "most requests of one key at a time")
    max_connections: int = option(
        8192,
        "most open connections, or fewer if the process has fewer descriptors: idle ones give way",
    )
    max_body_mib: float | None = option(
        None,
        "largest request body in MiB; default: 16 bytes for each token of the context, times "
        "max_completions, from 4 to 32",
    )
    max_documents: int = option(256, "most documents of one request")
    max_request_tokens: int | None = option(
        None, "most tokens of prompt and answer of one request; default: the model's context"
    )
    max_completions: int = option(64, "most outputs of one request: n times its prompts")
    max_schema_bytes: int = option(1 << 17, "most bytes of the JSON schema of an answer")
    max_schema_properties: int = option(1000, "most properties of the JSON schema of an answer")
    max_schema_depth: int = option(48, "most levels of the JSON schema of an answer")
    max_queue: int = option(256, "outputs that may wait for a free place; more are refused")
    max_registered: int = option(10_000, "most registered documents of one tenant")
    deadline: float = option(600.0, "seconds that a request may take, at most")
    drain_seconds: float = option(600.0, "seconds that running requests get when the server ends")
    stall_seconds: float = option(
        120.0, "seconds that one step of the engine may take before /health says that it is stuck"
    )
    warm_up: bool = option(
        True, "on a GPU, capture the graphs of usual steps before the port is open"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level to log")
    log_format: Literal["json", "console"] = option("json", "form of the log, one line an event")
    tracing: bool = option(False, "send OpenTelemetry traces, as the OTEL_ variables say")

    def __post_init__(self) -> None:
        require_kinds(self)
        require_each(self, "from 0 to 65535", lambda port: 0 <= port <= 65535, "port")
        require_positive(
            self,
            "requests_per_minute",
            "concurrent_requests",
            "max_connections",
            "max_body_mib",
            "max_documents",
            "max_request_tokens",
            "max_completions",
            "max_schema_bytes",
            "max_schema_properties",
            "max_schema_depth",
            "max_queue",
            "max_registered",
            "deadline",
            "drain_seconds",
            "stall_seconds",
        )
        template = self.document_template
        require(
            template is None or template.count("{text}") == 1,
            f"document_template must have {{text}} once, not as in {shown(template)}",
            "document_template",
        )
