"""What the routes work with: the engine, the models that are served over it, limits, metrics."""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from looseleaf import __version__
from looseleaf.config import ServerConfig
from looseleaf.engine.runner.runner import OnProgress
from looseleaf.errors import DeadlineExceeded, InvalidOption
from looseleaf.llm.async_llm import AsyncLLM
from looseleaf.llm.load import find_model
from looseleaf.models import read_advice
from looseleaf.prompt.request import Document, SystemPrompt
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
from looseleaf.server.logs import make_log, taking_over
from looseleaf.server.metrics import ServerMetrics
from looseleaf.server.prompts import PromptMaker, choose_template, longest_token
from looseleaf.server.records import Records
from looseleaf.server.scan import most_values
from looseleaf.server.tracing import Tracer, make_tracer

P = ParamSpec("P")
T = TypeVar("T")

State = Literal["ready", "draining", "stopped", "stuck"]

STEP_PATIENCE = 10.0
"""Seconds that a step under way gets at the end, before the engine is left to itself."""

_LOOK_SECONDS = 0.05
"""How often a server that ends looks whether requests are under way."""

REFERENCE_NAME = "looseleaf-reference"
TOKEN_BYTES = 16
"""Of a body for each token: four times what a token of text takes, so that escapes have room."""

LEAST_BODY_MIB, MOST_BODY_MIB = 4.0, 32.0
"""Between these is the size of the largest body where the operator gives none."""


@dataclass(frozen=True)
class ServedModel:
    """A name that clients may ask for: the weights, behind a system prompt of its own or none."""

    name: str
    system_text: str | None = None
    system_prompt: SystemPrompt | None = field(default=None, repr=False)


@dataclass(eq=False)
class Service:
    """One server's state. ``make_service`` builds it, ``start`` computes its system prompts.

    ``advice`` is what the model has as sampling fields where a request leaves them out.
    ``under_way`` counts requests that came before the server began to end; ``whole`` is whether
    all of them ended by themselves, None until that is known."""

    config: ServerConfig
    llm: AsyncLLM
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
    advice: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    under_way: int = 0
    whole: bool | None = None
    _due: float = math.inf
    _ending: "asyncio.Task[bool] | None" = None

    def __post_init__(self) -> None:
        self.metrics.watch_engine(
            lambda: self.state in ("ready", "draining") and not self.is_stuck,
            lambda: self.llm.busy_seconds,
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has been at one step for longer than any should take."""
        return self.llm.busy_seconds > self.config.stall_seconds

    @property
    def state(self) -> State:
        """What probes are told."""
        if self.draining:
            return "draining"
        if not self.llm.is_open:
            return "stopped"
        return "stuck" if self.is_stuck else "ready"

    async def start(self) -> None:
        """Compute and pin the system prompts, before any port is open; none once the end begins."""
        for name, model in self.models.items():
            if self.draining:
                return
            if model.system_text is not None:
                prompt = await self.llm.hold_system_prompt(model.system_text)
                self.models[name] = ServedModel(name, model.system_text, prompt)
                self.log.info("system_prompt", model=name, tokens=len(prompt.tokens))

    def begin_to_end(self) -> float:
        """Refuse new requests from now on; in how many seconds those that run are cut off."""
        now = time.monotonic()
        if not self.draining:
            self.draining, self._due = True, now + self.config.drain_seconds
        return max(0.0, self._due - now)

    async def stop(self) -> bool:
        """Let what runs end in the time it has, then close the engine; whether nothing was cut. Who
        asks again hears of the same end."""
        self.begin_to_end()
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> bool:
        while self.under_way and (left := self.begin_to_end()) > 0:
            await asyncio.sleep(min(left, _LOOK_SECONDS))
        cut = self.under_way
        # a moment at least where nobody is cut: an engine that has no work says so
        left = self.begin_to_end() if cut else max(1.0, self.begin_to_end())
        self.whole = await self.llm.drain(left, patience=STEP_PATIENCE) and not cut
        return self.whole

    def due(self) -> float:
        """When a request that comes now must have ended, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.config.deadline

    async def in_time(self, answer: Awaitable[T], due: float | None = None) -> T:
        """What the engine answers between two steps. Raises DeadlineExceeded once a request's time
        is over, by default that of one that comes now: a step may stand still."""
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
        make: Callable[P, T],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """What ``make`` returns, such as a prompt, in its tenant's turn. Raises DeadlineExceeded at
        ``due``, on the loop's clock."""
        try:
            async with asyncio.timeout_at(due):
                return await self.llm.prepare(caller.salt, make, *args, **named)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the prompt was not ready within the request's deadline: shorten it, or ask again "
                "in a while"
            ) from error

    @contextmanager
    def passing(self) -> Iterator[None]:
        """One request under way, from its head to the last byte of its answer."""
        # one that comes later is a probe, or is refused: the end does not wait for it
        counted = not self.draining
        self.under_way += counted
        try:
            yield
        finally:
            self.under_way -= counted

    @property
    def base_model(self) -> ServedModel:
        """The model that the command line names."""
        return next(iter(self.models.values()))

    @property
    def max_body(self) -> int:
        """Bytes of the largest body: as many as the operator says, or what all the prompts that a
        request may have take at the most."""
        most = self.config.max_body_mib
        if most is None:
            tokens = self.config.max_completions * self.llm.engine.max_model_len
            most = min(max(tokens * TOKEN_BYTES / 2**20, LEAST_BODY_MIB), MOST_BODY_MIB)
        return int(most * 2**20)

    @property
    def max_values(self) -> int:
        """Values and names that a body may have."""
        return most_values(self.llm.engine.max_model_len)

    def model(self, name: str) -> ServedModel:
        """The model of that name. Raises ApiError (404, or 503 as the server ends)."""
        self.require_ready()
        found = self.models.get(name)
        if found is None:
            raise ApiError(
                404,
                f"no model {name[:256]!r} is served here: GET /v1/models lists those that are",
                param="model",
                code="model_not_found",
            )
        return found

    def require_ready(self) -> None:
        """Raises ApiError (503) unless requests can be served."""
        if self.draining:
            raise unavailable("the server is shutting down: ask another one", "shutting_down")
        if not self.llm.is_open:
            raise ApiError(503, "the engine has stopped: restart the server", code="stopped")
        if self.is_stuck:
            raise unavailable("the engine stands still: ask another server", "stuck")

    def prompts(self, caller: Caller) -> PromptMaker:
        """Makes the prompts of a caller's requests."""
        return PromptMaker(
            self.llm.engine.prompts,
            self.template,
            self.llm.engine.max_model_len,
            lambda document_id: self._registered(document_id, caller),
            self.longest_token,
        )

    def _registered(self, document_id: str, caller: Caller) -> Document:
        with self.records.expecting(caller.tenant, document_id):
            return self.llm.registered(document_id, caller.salt)


def make_service(
    model: str | None,
    config: ServerConfig,
    options: Mapping[str, Any] | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Service:
    """Load a model and prepare to serve it; ``on_progress`` hears how far that is. Raises
    InvalidOption and ModelError before any port is open."""
    keys_file = Path(config.api_keys) if config.api_keys else None
    keys = read_keys(keys_file, os.environ.get(KEYS_VARIABLE))
    exposed = None if keys_file is None else exposure(keys_file)
    if exposed is not None and config.strict_permissions:
        raise InvalidOption(f"{exposed}, or drop --strict-permissions")
    require_safe(config, keys)
    models = _models(model, config)
    tracer = make_tracer(config.tracing)
    log_writer = LineWriter()
    log = make_log(config, log_writer)
    if exposed is not None:
        log.warning("keys_exposed", reason=exposed)
    # the engine's thread tells the metrics of its steps, and these ask the engine for counts
    metrics = ServerMetrics(lambda: llm.snapshot())
    told: dict[str, Any] = {"on_step": metrics.on_step, "on_progress": on_progress}
    with taking_over(log):
        folder = find_model(model)
        advice = read_advice(folder) if config.generation_config else {}
        llm = AsyncLLM(folder, warm_up=config.warm_up, **told, **(options or {}))
    if advice:
        log.info("sampling_defaults", source="generation_config.json", **advice)
    engine = llm.engine
    engine.books.on_queued = metrics.queued.observe
    engine.books.on_first_token = metrics.first_token.observe
    dtype = str(engine.runner.model.dtype).removeprefix("torch.")
    metrics.build.info({"version": __version__, "model": next(iter(models)), "dtype": dtype})
    return Service(
        config=config,
        llm=llm,
        models=models,
        keys=keys,
        metrics=metrics,
        log=log,
        log_writer=log_writer,
        tracer=tracer,
        limits=KeyLimits(config.requests_per_minute, config.concurrent_requests),
        queue=Queue(engine.config.scheduler.max_num_seqs, config.max_queue),
        records=Records(engine.config.tiers.disk_path, next(iter(models))),
        template=choose_template(config.document_template, engine.tokenizer),
        longest_token=longest_token(engine.tokenizer),
        fingerprint=f"looseleaf-{__version__}",
        advice=advice,
    )


def require_safe(config: ServerConfig, keys: KeyRing) -> None:
    """Raises InvalidOption unless everybody who can reach the server may use it."""
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


def _models(model: str | None, config: ServerConfig) -> dict[str, ServedModel]:
    name = config.served_model_name or (
        REFERENCE_NAME if model is None else _checkpoint_name(model)
    )
    models = {name: ServedModel(name)}
    for given in config.system_prompt:
        own_name, equals, path = given.rpartition("=")
        chosen = own_name if equals else name
        if not chosen or (chosen in models and models[chosen].system_text is not None):
            raise InvalidOption(
                f"--system-prompt {given}: give each model name one file, as NAME=FILE"
            )
        models[chosen] = ServedModel(chosen, _read_prompt(Path(path)))
    return models


def _checkpoint_name(model: str) -> str:
    folder = Path(model)
    return folder.resolve().name if folder.exists() else model


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"the system prompt {path} can't be read: {error}") from error
    if not text:
        raise InvalidOption(f"the system prompt {path} is empty: leave it out")
    return text
