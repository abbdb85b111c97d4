"""The server's shared state: the engine, its served models, limits and metrics."""

import asyncio
import math
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from looseleaf import __version__
from looseleaf.config import Reuse, ServerConfig
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.errors import DeadlineExceeded, InvalidOption
from looseleaf.llm.async_llm import AsyncLLM
from looseleaf.llm.client import EngineClient
from looseleaf.llm.load import find_model
from looseleaf.models import read_advice
from looseleaf.prompt.cutting import Cutter
from looseleaf.prompt.discover import Discovery
from looseleaf.prompt.request import Document, SystemPrompt
from looseleaf.server.counts import Counts
from looseleaf.server.engine_metrics import EngineMetrics
from looseleaf.server.errors import ApiError, unavailable
from looseleaf.server.keys import (
    KEYS_VARIABLE,
    Caller,
    KeyRing,
    exposure,
    is_loopback,
    read_keys,
)
from looseleaf.server.limits import KeyLimits, Queue
from looseleaf.server.line_writer import LineWriter
from looseleaf.server.logs import forward_logging, make_log
from looseleaf.server.metrics import ServerMetrics
from looseleaf.server.names import REFERENCE_NAME as REFERENCE_NAME
from looseleaf.server.names import base_name
from looseleaf.server.prompts import PromptMaker, choose_template, longest_token
from looseleaf.server.records import Records
from looseleaf.server.response_store import LocalStore, ResponseStore, ResponseTable
from looseleaf.server.scan import most_values
from looseleaf.server.seen_texts import SeenTexts
from looseleaf.server.tracing import Tracer, make_tracer

P = ParamSpec("P")
T = TypeVar("T")

State = Literal["ready", "draining", "restarting", "stopped", "stuck"]

STEP_PATIENCE = 10.0
"""Seconds that shutdown waits for the running step before it abandons the engine."""

_POLL_SECONDS = 0.05
"""Interval at which shutdown checks for running requests."""

TOKEN_BYTES = 16
"""Body bytes allowed per token: four times the usual size of a token, for JSON escapes."""

MIN_BODY_MIB, MAX_BODY_MIB = 4.0, 32.0
"""Range of the default body limit."""


@dataclass(frozen=True)
class ServedModel:
    """A model name that clients may request, with its own system prompt or none."""

    name: str
    system_text: str | None = None
    system_prompt: SystemPrompt | None = field(default=None, repr=False)


@dataclass(eq=False)
class Service:
    """One server's state. `make_service` builds it, `start` computes its system prompts.

    ``advice`` holds the checkpoint's defaults for sampling fields. ``under_way`` counts requests
    that arrived before shutdown began. ``whole`` is whether all of them completed, None until the
    drain ends. ``restores`` is whether the start of the application registers the documents of all
    records again. ``scrape`` returns the metrics of all processes, None for those of this one."""

    config: ServerConfig
    llm: EngineClient
    models: dict[str, ServedModel]
    keys: KeyRing
    metrics: ServerMetrics
    log: Any
    log_writer: LineWriter
    tracer: Tracer
    limits: KeyLimits
    queue: Queue
    records: Records
    template: str
    longest_token: int
    fingerprint: str
    seen_texts: SeenTexts
    responses: ResponseStore
    discovery: Discovery | None = None
    advice: Mapping[str, Any] = field(default_factory=dict)
    restores: bool = True
    scrape: Callable[[], Awaitable[bytes]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    under_way: int = 0
    whole: bool | None = None
    _drain_deadline: float = math.inf
    _shutdown: "asyncio.Task[bool] | None" = None

    def __post_init__(self) -> None:
        self.metrics.watch_engine(
            lambda: self.state in ("ready", "draining") and not self.is_stuck,
            lambda: self.llm.busy_seconds,
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the running step has exceeded ``stall_seconds``."""
        return self.llm.busy_seconds > self.config.stall_seconds

    @property
    def state(self) -> State:
        """The state that health probes report."""
        if self.draining:
            return "draining"
        if self.llm.is_lost:
            return "restarting"
        if not self.llm.is_open:
            return "stopped"
        return "stuck" if self.is_stuck else "ready"

    async def start(self) -> None:
        """Compute and pin the system prompts, before any port opens; stops early at shutdown."""
        for name, model in self.models.items():
            if self.draining:
                return
            if model.system_text is not None:
                prompt = await self.llm.hold_system_prompt(model.system_text)
                self.models[name] = ServedModel(name, model.system_text, prompt)
                self.log.info("system_prompt", model=name, tokens=len(prompt.tokens))

    def begin_shutdown(self) -> float:
        """Refuse new requests from now on; the seconds until running requests are cut off."""
        now = time.monotonic()
        if not self.draining:
            self.draining, self._drain_deadline = True, now + self.config.drain_seconds
        return max(0.0, self._drain_deadline - now)

    async def stop(self) -> bool:
        """Drain running requests, then close the engine; whether all requests completed.

        Later calls return the same result."""
        self.begin_shutdown()
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._drain_and_close())
        return await asyncio.shield(self._shutdown)

    async def _drain_and_close(self) -> bool:
        while self.under_way and (seconds := self.begin_shutdown()) > 0:
            await asyncio.sleep(min(seconds, _POLL_SECONDS))
        cut_requests = self.under_way
        seconds = self.begin_shutdown()
        # an idle engine needs a moment to confirm that it has no work
        seconds = seconds if cut_requests else max(1.0, seconds)
        self.whole = await self.llm.drain(seconds, patience=STEP_PATIENCE) and not cut_requests
        return self.whole

    def due(self) -> float:
        """The deadline of a request that arrives now, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.config.deadline

    async def with_deadline(self, answer: Awaitable[T], due: float | None = None) -> T:
        """The engine's answer. Raises DeadlineExceeded at ``due``, by default `due()`."""
        try:
            async with asyncio.timeout_at(self.due() if due is None else due):
                return await answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the engine did not answer within {self.config.deadline} s: ask again in a while"
            ) from error

    async def prepare(
        self,
        caller: Caller,
        due: float,
        function: Callable[P, T],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """The result of ``function``, run in a thread of the caller's tenant.

        Raises DeadlineExceeded at ``due``, on the loop's clock."""
        try:
            async with asyncio.timeout_at(due):
                return await self.llm.prepare(caller.salt, function, *args, **named)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the prompt was not ready within the request's deadline: shorten it, or ask again "
                "in a while"
            ) from error

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Count one request, from its head to the last byte of its answer."""
        # shutdown does not wait for requests that arrive after it began
        counted = not self.draining
        self.under_way += counted
        try:
            yield
        finally:
            self.under_way -= counted

    async def exposition(self) -> bytes:
        """The metrics of the server in Prometheus' format."""
        if self.scrape is not None:
            return await self.scrape()
        return await asyncio.to_thread(self.metrics.render)

    @property
    def base_model(self) -> ServedModel:
        """The model named on the command line."""
        return next(iter(self.models.values()))

    @property
    def max_body(self) -> int:
        """Bytes of the largest body; by default enough for ``max_completions`` full contexts."""
        mib = self.config.max_body_mib
        if mib is None:
            tokens = self.config.max_completions * self.llm.facts.max_model_len
            mib = min(max(tokens * TOKEN_BYTES / 2**20, MIN_BODY_MIB), MAX_BODY_MIB)
        return int(mib * 2**20)

    @property
    def max_values(self) -> int:
        """Most JSON values and names of a body."""
        return most_values(self.llm.facts.max_model_len)

    def model(self, name: str) -> ServedModel:
        """The model ``name``. Raises ApiError: 404, or 503 during shutdown."""
        self.require_ready()
        model = self.models.get(name)
        if model is None:
            raise ApiError(
                404,
                f"no model {name[:256]!r} is served here: GET /v1/models lists those that are",
                param="model",
                code="model_not_found",
            )
        return model

    def require_ready(self) -> None:
        """Raises ApiError (503) unless requests can be served."""
        if self.draining:
            raise unavailable("the server is shutting down: ask another server", "shutting_down")
        if self.llm.is_lost:
            raise unavailable("the engine starts again: ask again in a moment", "restarting")
        if not self.llm.is_open:
            raise ApiError(503, "the engine has stopped: restart the server", code="stopped")
        if self.is_stuck:
            raise unavailable("the engine is stuck in a step: ask another server", "stuck")

    def prompts(
        self, caller: Caller, cache_salt: str | None = None, reuse: Reuse = "documents"
    ) -> PromptMaker:
        """The prompt maker of the caller's tenant, for a request with its own salt or without."""
        return PromptMaker(
            self.llm.prompts,
            self.template,
            self.llm.facts.max_model_len,
            lambda document_ids: self._registered(document_ids, caller),
            self.longest_token,
            caller.salted(cache_salt).salt,
            self.seen_texts,
            reuse,
            self.discovery,
        )

    def _registered(self, document_ids: Sequence[str], caller: Caller) -> list[Document]:
        with self.records.expecting(caller.tenant, *document_ids):
            return self.llm.registered(document_ids, caller.salt)


@dataclass(frozen=True)
class Frontend:
    """The parts of a server that need no engine: checked options, keys, log and tracer."""

    config: ServerConfig
    folder: Path
    models: dict[str, ServedModel]
    keys: KeyRing
    log: Any
    log_writer: LineWriter
    tracer: Tracer
    advice: Mapping[str, Any]

    @classmethod
    def create(
        cls, model: str | None, config: ServerConfig, *, announces: bool = True
    ) -> "Frontend":
        """Check the options of a server. Raises InvalidOption and ModelError.

        One process of several ``announces`` the options in the log."""
        keys_file = Path(config.api_keys) if config.api_keys else None
        keys = read_keys(keys_file, os.environ.get(KEYS_VARIABLE))
        exposed = None if keys_file is None else exposure(keys_file)
        if exposed is not None and config.strict_permissions:
            raise InvalidOption(f"{exposed}, or drop --strict-permissions")
        require_safe(config, keys)
        _require_certificate(config)
        models = _models(model, config)
        tracer = make_tracer(config.tracing)
        log_writer = LineWriter()
        log = make_log(config, log_writer)
        if exposed is not None and announces:
            log.warning("keys_exposed", reason=exposed)
        with forward_logging(log):
            folder = find_model(model)
            advice = read_advice(folder) if config.generation_config else {}
        if advice and announces:
            log.info("sampling_defaults", source="generation_config.json", **advice)
        return cls(config, folder, models, keys, log, log_writer, tracer, advice)

    @property
    def base_name(self) -> str:
        """The name of the model on the command line."""
        return next(iter(self.models))

    def service(
        self, llm: EngineClient, metrics: ServerMetrics, counts: Counts | None = None
    ) -> Service:
        """The server's state over an engine; ``counts`` are those of all its processes."""
        config, facts = self.config, llm.facts
        discovers = config.reuse == "discover"
        shares = counts is not None
        counts = Counts() if counts is None else counts
        return Service(
            config=config,
            llm=llm,
            models=self.models,
            keys=self.keys,
            metrics=metrics,
            log=self.log,
            log_writer=self.log_writer,
            tracer=self.tracer,
            limits=KeyLimits(config.requests_per_minute, config.concurrent_requests, counts=counts),
            queue=Queue(facts.max_num_seqs, config.max_queue, counts=counts),
            records=Records(facts.disk_path, self.base_name, shared=shares),
            template=choose_template(config.document_template, llm.tokenizer),
            longest_token=longest_token(llm.tokenizer),
            fingerprint=f"looseleaf-{__version__}",
            seen_texts=SeenTexts(on_hit=metrics.seen_texts.inc),
            responses=LocalStore(ResponseTable.of(config)),
            discovery=Discovery(Cutter.of(llm.tokenizer)) if discovers else None,
            advice=self.advice,
        )


def make_service(
    model: str | None,
    config: ServerConfig,
    options: Mapping[str, Any] | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Service:
    """Load a model and prepare to serve it in one process; ``on_progress`` reports the progress.

    Raises InvalidOption and ModelError before any port is open."""
    frontend = Frontend.create(model, config)
    metrics = ServerMetrics()
    engine_metrics = EngineMetrics(metrics.registry)
    with forward_logging(frontend.log):
        llm = AsyncLLM(
            frontend.folder,
            warm_up=config.warm_up,
            on_step=engine_metrics.on_step,
            on_progress=on_progress,
            **(options or {}),
        )
    engine_metrics.watch(llm, frontend.base_name)
    return frontend.service(llm, metrics)


def require_safe(config: ServerConfig, keys: KeyRing) -> None:
    """Raises InvalidOption for a server without keys that other hosts can reach."""
    if not keys.is_open:
        return
    if not is_loopback(config.host):
        raise InvalidOption(
            f"{config.host} can be reached from outside, so API keys are needed: give --api-keys "
            f"FILE or set {KEYS_VARIABLE}, or listen at 127.0.0.1"
        )
    if not config.open_loopback:
        raise InvalidOption(
            f"there are no API keys, and --no-open-loopback: give --api-keys FILE or set "
            f"{KEYS_VARIABLE}"
        )


def _require_certificate(config: ServerConfig) -> None:
    """Raises InvalidOption for a certificate or a key that can't be read."""
    if config.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ValueError) as error:
        raise InvalidOption(
            f"the TLS certificate {config.tls_cert} and its key can't be used: {error}",
            "tls_cert",
            "tls_key",
        ) from error


def _models(model: str | None, config: ServerConfig) -> dict[str, ServedModel]:
    name = base_name(model, config)
    models = {name: ServedModel(name)}
    for option in config.system_prompt:
        option_name, equals, path = option.rpartition("=")
        model_name = option_name if equals else name
        if not model_name or (model_name in models and models[model_name].system_text is not None):
            raise InvalidOption(
                f"--system-prompt {option}: give each model name one file, as NAME=FILE"
            )
        models[model_name] = ServedModel(model_name, _read_prompt(Path(path)))
    return models


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"the system prompt {path} can't be read: {error}") from error
    if not text:
        raise InvalidOption(f"the system prompt {path} is empty: leave it out")
    return text
