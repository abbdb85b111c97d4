"""Bodies of ``/v1/documents``."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from looseleaf.config import IndexKind
from looseleaf.server.protocol.base import FIRST_ONLY, Defaulting, Strict
from looseleaf.server.protocol.common import Context, DocumentId, Name


class RegisterRequest(Defaulting):
    """``POST /v1/documents``: compute a document and keep its text under an id."""

    id: DocumentId | None = Field(None, description="The default is derived from the text.")
    title: str | None = Field(None, max_length=1024)
    text: str | Annotated[list[str], FIRST_ONLY] = Field(
        description="A list is a collection: one document, in which each text sees the texts "
        "before it. Its title is a name only, not a part of the text."
    )
    model: Name | None = Field(
        None, description="The model of its chats; the document's context is its system prompt."
    )
    system: str | None = Field(None, description="The system text of its chats.")
    context: Context = Field("lead", description="Its context; only `lead` can be registered.")
    pinned: bool = Field(False, description="Never evict it until it is unpinned or deleted.")
    hosted: bool = Field(
        False,
        description="Keep it in host memory behind a vector index, for `select` by `retrieval`; "
        "it may exceed the pool.",
    )
    index: IndexKind = Field("auto", description="The index of a hosted document.")
    wait: bool = Field(True, description="Answer after it is computed, not immediately.")
    stream: bool = Field(False, description="Answer with a stream of its progress.")
    require_kept: bool = Field(
        True,
        description="Where the server has a disk: refuse with 507 unless the registration was "
        "written to it. With false, the answer says whether it was (`kept`).",
    )

    @model_validator(mode="after")
    def _agree(self) -> "RegisterRequest":
        if self.context != "lead":
            raise ValueError(
                "a registered document has the context 'lead': for the context "
                f"{self.context!r}, send its text with each request"
            )
        if self.stream and not self.wait:
            raise ValueError("stream needs wait: true: drop stream, or wait: false")
        if self.hosted and self.pinned:
            raise ValueError("a hosted document has no pages to pin: drop pinned or hosted")
        if self.index != "auto" and not self.hosted:
            raise ValueError("only hosted documents have an index: add hosted, or drop index")
        return self


class DocumentBody(Strict):
    """The state of a registered document."""

    id: str
    object: Literal["document"] = "document"
    title: str | None
    created: int
    state: Literal["computing", "ready", "evicted"] = Field(
        description="An evicted document is computed again when a request needs it."
    )
    tokens: int
    tokens_done: int
    bytes: int
    pages: int
    pinned: bool
    hosted: bool = Field(description="Whether it is read outside of the pool, by an index.")
    kept: bool | None = Field(
        description="Whether it is registered again after a restart; null without a disk."
    )
    stored: bool | None = Field(
        description="Whether its keys and values (and its index) were on disk or at the remote "
        "server when it became ready; if not, a restart computes them again. Null while that is "
        "not known, and without such a tier."
    )
    references: int = Field(description="Outputs that read it now.")
    hits: int = Field(description="Requests that did not have to compute it.")
    computed: int = Field(description="How many times it was computed.")
    seconds: float | None = Field(description="What its latest computation took.")


class DocumentList(Strict):
    """Registered documents of a tenant, oldest first; ``last_id`` is ``after`` of the next page."""

    object: Literal["list"] = "list"
    data: list[DocumentBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedDocument(Strict):
    """The answer to a deletion."""

    id: str
    object: Literal["document"] = "document"
    deleted: Literal[True] = True
