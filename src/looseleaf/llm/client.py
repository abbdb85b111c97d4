"""The operations of an engine that a server uses: plain data in and out, in any process.

`AsyncLLM` implements them in its own process, `RemoteEngine` over a socket."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.engine.documents.holdings import HeldDocuments
from looseleaf.engine.reports.outputs import (
    AttentionPath,
    RequestMetrics,
    ReuseReport,
    RevisionReport,
    SelectReport,
)
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.errors import EngineFault
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.builder import PromptBuilder
from looseleaf.prompt.request import Document, Request, SystemPrompt

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineFacts:
    """Fixed properties of an engine.

    ``max_num_seqs`` is the most running outputs. ``disk_path`` is the folder of the disk tier, None
    without one. ``threads`` describes the CPU threads, None on a GPU."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    dtype: str
    disk_path: str | None = None
    threads: str | None = None


@runtime_checkable
class Completion(Protocol):
    """One output of a request, as in `CompletionOutput`. The text only grows."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[tuple[TokenLogprob, ...]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...


@runtime_checkable
class Output(Protocol):
    """The state of a request, as in `RequestOutput`."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...
    @property
    def reuse(self) -> ReuseReport: ...
    @property
    def metrics(self) -> RequestMetrics: ...
    @property
    def finished(self) -> bool: ...
    @property
    def attention(self) -> AttentionPath: ...
    @property
    def revision(self) -> RevisionReport | None: ...
    @property
    def select(self) -> SelectReport | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[tuple[TokenLogprob, ...] | None] | None: ...


@runtime_checkable
class EngineClient(Protocol):
    """An engine for the coroutines of one event loop.

    ``is_lost`` is whether the engine's process has ended and may start again. ``fault`` is the
    error that ended the engine for good, else None. ``busy_seconds`` is the age of the current
    step."""

    @property
    def facts(self) -> EngineFacts: ...
    @property
    def prompts(self) -> PromptBuilder: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def fault(self) -> EngineFault | None: ...
    @property
    def busy_seconds(self) -> float: ...

    def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """The growing output of a request; leaving the loop aborts it."""
        ...

    async def prepare(self, salt: str, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The result of ``make`` from threads that salts share fairly."""
        ...

    async def hold_system_prompt(self, text: str) -> SystemPrompt:
        """Compute a system prompt and keep it in the cache."""
        ...

    def register(
        self,
        document: Document,
        *,
        document_id: str | None = None,
        salt: str = "",
        system_prompt: SystemPrompt | None = None,
        system: str | None = None,
        pinned: bool = False,
        hosted: IndexConfig | None = None,
        most: int | None = None,
    ) -> AsyncGenerator[DocumentInfo, None]:
        """Compute a document in advance and keep it under an id; yields its progress."""
        ...

    async def documents(
        self, salt: str = "", *, after: str | None = None, limit: int | None = None
    ) -> list[DocumentInfo]:
        """The registered documents of a salt, oldest first."""
        ...

    async def document(self, document_id: str, salt: str = "") -> DocumentInfo:
        """The state of a registered document. Raises DocumentNotFound."""
        ...

    def registered(self, document_ids: Sequence[str], salt: str = "") -> list[Document]:
        """Registered documents; called outside of the event loop. Raises DocumentNotFound."""
        ...

    async def pin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Keep a document in the cache. Raises DocumentNotFound."""
        ...

    async def unpin(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Allow eviction of a document again. Raises DocumentNotFound."""
        ...

    async def delete(self, document_id: str, salt: str = "") -> DocumentInfo:
        """Delete a document. Raises DocumentNotFound."""
        ...

    async def holdings(self) -> HeldDocuments:
        """The documents that the engine holds, and its load."""
        ...

    async def writes_done(self) -> None:
        """Return after all pending writes to tiers."""
        ...

    async def drain(self, timeout: float | None = None, *, patience: float | None = None) -> bool:
        """Reject new requests, wait for accepted requests, then close."""
        ...

    def close(self, timeout: float | None = None) -> bool:
        """End all requests and release the engine."""
        ...
