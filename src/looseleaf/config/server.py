"""The configuration of the HTTP server: address, authentication, limits, logging."""

from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_each,
    require_kinds,
    require_not_negative,
    require_positive,
    shown,
)

ToolForm = Literal[
    "gemma", "glm", "granite", "harmony", "hermes", "llama3_json", "mistral", "phi", "pythonic"
]
"""Forms of tool calls, by the names of their parsers."""


Reuse = Literal["exact", "documents", "discover"]
"""What a request may reuse; each level permits all of the levels before it."""


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of the HTTP server. Raises InvalidOption for values out of range."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free port")
    served_model_name: str | None = option(
        None, "name of the model for clients; default: the name of the checkpoint"
    )
    system_prompt: tuple[str, ...] = option(
        (),
        "[NAME=]FILE: text before every chat, computed once; with NAME, for an additional model of "
        "that name; may be repeated",
    )
    generation_config: bool = option(
        True,
        "take sampling parameters that a request leaves out from the model's "
        "generation_config.json",
    )
    document_template: str | None = option(
        None,
        "a document's text from {title} and {text}; without a title, lines with {title} are left "
        "out; default: '{text}', after a line with the title if the model has no form for "
        "documents",
    )
    tool_parser: ToolForm | None = option(
        None, "form of the model's tool calls; default: by the markers of its chat template"
    )
    reuse: Reuse = option(
        "documents",
        "most reuse of keys and values: exact (prefixes only), documents (also marked documents), "
        "or discover (also texts that earlier prompts contained, found by their contents)",
    )
    unknown_fields: Literal["warn", "refuse"] = option(
        "warn", "ignore unknown fields of requests with a header that names them, or refuse them"
    )
    cors_origins: tuple[str, ...] = option(
        (), "origin of web pages that may call the server, or *; may be repeated"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name by which a server without keys may be called, besides localhost; may be "
        "repeated",
    )
    tls_cert: str | None = option(None, "file of the TLS certificate chain (PEM)")
    tls_key: str | None = option(
        None, "file of the TLS key (PEM); default: the file of the certificate"
    )
    api_keys: str | None = option(
        None,
        "file of lines TENANT=KEY, also in LOOSELEAF_KEYS; tenants share nothing",
    )
    strict_permissions: bool = option(
        False,
        "refuse a file of API keys that users other than its owner can read or change; without "
        "this, the log warns of it",
    )
    open_loopback: bool = option(
        True, "without keys, answer callers on this machine, and no others"
    )
    open_metrics: bool = option(False, "serve /metrics to callers without a key")
    operator: str = option("operator", "the tenant whose keys may read /metrics")
    requests_per_minute: int | None = option(None, "most requests per minute of one key")
    concurrent_requests: int | None = option(None, "most concurrent requests of one key")
    api_processes: int | None = option(
        None,
        "processes for HTTP in front of the engine's process; 0: one process for all; default: by "
        "cores and device",
    )
    engine_restarts: int = option(
        10, "most restarts of an engine process that ends unexpectedly, then the server ends"
    )
    max_connections: int = option(
        8192,
        "most open connections, or fewer if the process has fewer descriptors; idle ones are "
        "closed first",
    )
    max_body_mib: float | None = option(
        None,
        "largest request body in MiB; default: 16 bytes per token of the context, times "
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
    max_queue: int = option(256, "most waiting outputs; further requests are refused")
    max_registered: int = option(10_000, "most registered documents of one tenant")
    stored_responses_mib: float = option(
        64.0, "memory for responses that later requests continue (MiB); 0: none are kept"
    )
    deadline: float = option(600.0, "longest duration of a request (s)")
    drain_seconds: float = option(600.0, "time limit of running requests at shutdown (s)")
    stall_seconds: float = option(
        120.0, "duration of an engine step after which /health reports a stalled engine (s)"
    )
    warm_up: bool = option(True, "on a GPU, capture the usual CUDA graphs before the port opens")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level to log")
    log_format: Literal["json", "console"] = option("json", "log format, one line per event")
    tracing: bool = option(False, "send OpenTelemetry traces, configured by the OTEL_ variables")

    def __post_init__(self) -> None:
        require_kinds(self)
        require_not_negative(self, "api_processes", "engine_restarts", "stored_responses_mib")
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
        require(
            self.tls_key is None or self.tls_cert is not None,
            "tls_key needs a certificate: give tls_cert, too",
            "tls_key",
            "tls_cert",
        )
        template = self.document_template
        require(
            template is None or template.count("{text}") == 1,
            f"document_template must contain {{text}} once, not be {shown(template)}",
            "document_template",
        )
