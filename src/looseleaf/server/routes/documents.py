"""``/v1/documents``: documents that a tenant registers under an id before requests read them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.errors import DocumentNotFound
from looseleaf.server.body import StrictRoute
from looseleaf.server.connection import EventStream, until_gone
from looseleaf.server.events import Event
from looseleaf.server.keys import Caller
from looseleaf.server.protocol.answers import ERRORS
from looseleaf.server.protocol.documents import (
    DeletedDocument,
    DocumentBody,
    DocumentList,
    RegisterRequest,
)
from looseleaf.server.records import record_name
from looseleaf.server.registering import forget, keep, keep_pin, record_of, register, settled
from looseleaf.server.routes.common import page_of
from looseleaf.server.routes.context import KEYED, TheCaller, TheService, report_error
from looseleaf.server.service import Service

router = APIRouter(
    prefix="/v1/documents",
    route_class=StrictRoute,
    responses=ERRORS,
    dependencies=KEYED,
    tags=["documents"],
)

Id = Annotated[str, Path(max_length=256, description="The id of a registered document.")]
After = Annotated[
    str | None, Query(max_length=256, description="List the documents after this id.")
]
# the list occupies the engine's thread for microseconds per document, which delays all answers
Limit = Annotated[int, Query(ge=1, le=1000, description="Most documents in the list.")]


@router.post("", response_model=DocumentBody, status_code=201)
async def register_document(
    body: RegisterRequest, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """Compute a document and keep its text under an id.

    The same text is the same document. With `stream` the answer is a stream of states. With
    `wait: false` the server answers immediately, and `GET` reports the progress. After a timeout
    the document is still computed; registering it again waits for it."""
    progress = _register(service, body, caller)
    if body.stream:
        first = await until_gone(request.receive, anext(progress))
        return EventStream(_told(first, progress, request, partial(_body, service, caller)))
    info = await until_gone(request.receive, _last(progress, whole=body.wait))
    return JSONResponse(_body(service, caller, info), 201 if info.state == "ready" else 202)


@router.get("", response_model=DocumentList)
async def list_documents(
    service: TheService, caller: TheCaller, after: After = None, limit: Limit = 1000
) -> Response:
    """The documents of the caller's tenant, oldest first, beginning after the id ``after``."""
    service.require_ready()
    with nullcontext() if after is None else service.records.expecting(caller.tenant, after):
        listing = service.llm.documents(caller.salt, after=after, limit=limit + 1)
        infos = await service.with_deadline(listing)
    return page_of([_body(service, caller, info) for info in infos], limit)


@router.get("/{document_id}", response_model=DocumentBody)
async def get_document(document_id: Id, service: TheService, caller: TheCaller) -> Response:
    """The current state of a document."""
    service.require_ready()
    with service.records.expecting(caller.tenant, document_id):
        info = await service.with_deadline(service.llm.document(document_id, caller.salt))
    return JSONResponse(_body(service, caller, info))


async def pin_document(document_id: Id, service: TheService, caller: TheCaller) -> Response:
    """Pin a document's pages; an evicted document is computed again."""
    service.require_ready()
    pinned = service.llm.pin(document_id, caller.salt)
    info = await _with_pin(service, caller, document_id, pinned)
    return JSONResponse(_body(service, caller, info))


# a pin has no body, so `StrictRoute` must not require a content type
router.add_api_route(
    "/{document_id}/pin",
    pin_document,
    methods=["POST"],
    response_model=DocumentBody,
    route_class_override=APIRoute,
)


@router.delete("/{document_id}/pin", response_model=DocumentBody)
async def unpin_document(document_id: Id, service: TheService, caller: TheCaller) -> Response:
    """Unpin a document, so that the server may evict it."""
    service.require_ready()
    unpinned = service.llm.unpin(document_id, caller.salt)
    info = await _with_pin(service, caller, document_id, unpinned)
    return JSONResponse(_body(service, caller, info))


@router.delete("/{document_id}", response_model=DeletedDocument)
async def delete_document(document_id: Id, service: TheService, caller: TheCaller) -> Response:
    """Delete a document. Running requests that read it are not affected."""
    service.require_ready()
    due = service.due()
    with service.records.expecting(caller.tenant, document_id):
        try:
            await service.with_deadline(service.llm.delete(document_id, caller.salt), due)
        except DocumentNotFound:
            # an earlier deletion could not remove the record
            if record_name(caller.tenant, document_id) not in service.records.unremoved:
                raise
    # the deletion completes even if the deadline passes
    await service.with_deadline(asyncio.shield(forget(service, caller, document_id)), due)
    return JSONResponse({"id": document_id, "object": "document", "deleted": True})


async def _register(
    service: Service, body: RegisterRequest, caller: Caller
) -> AsyncGenerator[DocumentInfo, None]:
    due, model = service.due(), service.model(body.model or service.base_model.name)
    record = record_of(body, caller, model.name)
    (registration,) = record.registrations
    most = service.config.max_registered
    async with aclosing(register(service, registration, caller, record, most)) as progress:  # type: ignore[type-var]
        info = await service.with_deadline(anext(progress), due)
        record = record.model_copy(update={"id": info.id})
        kept = keep(service, caller, record, required=body.require_kept)
        # the registration completes even if the client disconnects
        await service.with_deadline(asyncio.shield(kept), due)
        # `settled` also checks a document that was registered before
        yield await settled(service, caller, info) if body.wait else info
        while (later := await service.with_deadline(anext(progress, None), due)) is not None:
            yield await settled(service, caller, later)


async def _with_pin(
    service: Service, caller: Caller, document_id: str, change: Awaitable[DocumentInfo]
) -> DocumentInfo:
    due = service.due()
    with service.records.expecting(caller.tenant, document_id):
        info = await service.with_deadline(change, due)
    await service.with_deadline(asyncio.shield(keep_pin(service, caller, info)), due)
    return info


async def _last(progress: AsyncIterator[DocumentInfo], *, whole: bool) -> DocumentInfo:
    async with aclosing(progress):  # type: ignore[type-var]
        info = await anext(progress)
        if whole:
            async for later in progress:
                info = later
    return info


async def _told(
    first: DocumentInfo,
    progress: AsyncIterator[DocumentInfo],
    request: Request,
    body: Callable[[DocumentInfo], Event],
) -> AsyncGenerator[list[Event], None]:
    try:
        async with aclosing(progress):  # type: ignore[type-var]
            yield [body(first)]
            async for info in progress:
                yield [body(info)]
    except Exception as error:
        yield [report_error(request, error).body]


def _body(service: Service, caller: Caller, info: DocumentInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "document",
        "title": info.name,
        "created": int(info.created),
        "state": info.state,
        "tokens": info.num_tokens,
        "tokens_done": info.tokens_done,
        "bytes": info.num_bytes,
        "pages": info.num_pages,
        "pinned": info.pinned,
        "hosted": info.hosted,
        "kept": service.records.keeps(caller.tenant, info.id),
        "stored": info.stored,
        "references": info.references,
        "hits": info.hits,
        "computed": info.computed,
        "seconds": info.seconds,
    }
