"""Registers documents, keeps their records on disk up to date, and restores them at start.

The server updates a record before it answers a registration or a deletion. If the disk refuses, the
server answers with an error (507), counts it and logs it. A client may instead request a document
that ends with the process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.entry import DocumentInfo
from looseleaf.errors import DocumentNotFound, EngineClosed, InvalidRequest
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import Caller
from looseleaf.server.protocol.documents import RegisterRequest
from looseleaf.server.records import Record, Registration, record_name
from looseleaf.server.service import Service

_SETTLE_SECONDS = 10.0


def register(
    service: Service, registration: Registration, caller: Caller, about: Record, most: int | None
) -> AsyncIterator[DocumentInfo]:
    """Compute a document; ``about`` has its text, and an empty id for a derived id."""
    model = service.model(registration.model)
    document = service.prompts(caller).render(about.title, about.text)
    return service.llm.register(
        document,
        document_id=about.id or None,
        salt=caller.salt,
        system_prompt=model.system_prompt,
        system=registration.system,
        pinned=about.pinned and not registration.hosted,
        hosted=IndexConfig(registration.index) if registration.hosted else None,
        most=most,
    )


def record_of(body: RegisterRequest, caller: Caller, model: str) -> Record:
    """The record of a registration for a served model."""
    return Record(
        tenant=caller.tenant,
        id=body.id or "",
        title=body.title,
        text=body.text,
        pinned=body.pinned,
        registrations=[
            Registration(model=model, system=body.system, hosted=body.hosted, index=body.index)
        ],
    )


async def keep(service: Service, caller: Caller, record: Record, *, required: bool) -> None:
    """Write the record of a registration, unless the document was deleted meanwhile.

    Raises ApiError (507) if a ``required`` write fails, and then deletes a new document."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        try:
            info = await service.llm.document(record.id, caller.salt)
        except DocumentNotFound:
            return
        name = record_name(caller.tenant, record.id)
        record = record.model_copy(update={"pinned": info.pinned})
        known = name in records.unkept or await asyncio.to_thread(
            records.has, caller.tenant, record.id
        )
        reason = await _tried(service, record.id, "registration", lambda: records.write(record))
        if reason is None:
            records.unkept.discard(name)
            records.unremoved.discard(name)
            return
        if not required:
            records.unkept.add(name)
            return
        if not known:
            with suppress(DocumentNotFound):
                await service.llm.delete(record.id, caller.salt)
    raise _not_kept(
        f"the document can't be written to the server's disk ({reason}), so it is not registered: "
        "try again when the disk has room, or send require_kept: false for a document that ends "
        "with the server"
    )


def _not_kept(message: str) -> ApiError:
    return ApiError(507, message, code="not_kept", headers={"x-should-retry": "false"})


async def settled(service: Service, caller: Caller, info: DocumentInfo) -> DocumentInfo:
    """The state of a ready document after all pending writes to tiers; ``info`` after a timeout."""
    if info.state != "ready" or service.records.folder is None:
        return info
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            await service.llm.writes_done()
        info = await service.llm.document(info.id, caller.salt)
    except (TimeoutError, DocumentNotFound):
        return info
    if info.stored is False:
        service.metrics.not_kept.labels("keys").inc()
    return info


async def keep_pin(service: Service, caller: Caller, info: DocumentInfo) -> None:
    """Write the pin of a document into its record. Raises ApiError (507)."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        reason = await _tried(
            service, info.id, "pin", lambda: records.pin(caller.tenant, info.id, info.pinned)
        )
    if reason is not None:
        raise _not_kept(
            f"the document is {'pinned' if info.pinned else 'unpinned'} until the server ends, but "
            f"that can't be written to its disk ({reason}): try again when the disk has room"
        )


async def forget(service: Service, caller: Caller, document_id: str) -> None:
    """Remove the record of a deleted document, unless it is registered again.

    Raises ApiError (507)."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        try:
            await service.llm.document(document_id, caller.salt)
            return
        except DocumentNotFound:
            reason = await _tried(
                service, document_id, "deletion", lambda: records.remove(caller.tenant, document_id)
            )
        name = record_name(caller.tenant, document_id)
        if reason is None:
            records.unkept.discard(name)
            records.unremoved.discard(name)
            return
        records.unremoved.add(name)
    raise _not_kept(
        f"the document is deleted until the server starts again, but its record can't be removed "
        f"from the disk ({reason}): delete it again when the disk is well"
    )


async def _tried(
    service: Service, document_id: str, change: str, action: Callable[[], None]
) -> str | None:
    """None if ``action`` succeeds, else the reason of the failure, after its count and log line."""
    try:
        await asyncio.to_thread(action)
    except (OSError, ValueError) as error:
        service.metrics.not_kept.labels(change).inc()
        service.log.warning(
            "registration_not_kept", id=document_id, change=change, reason=str(error)
        )
        # without the path, which only the operator may see
        return getattr(error, "strerror", None) or type(error).__name__
    return None


async def register_again(service: Service) -> None:
    """Register the documents of all records, one at a time, so a request waits for one at most.

    A document that fails is a warning in the log, and its file stays."""
    coming, again = service.records.coming, 0
    if service.records.unlisted is not None:
        service.metrics.left_out.inc()
        service.log.error("registrations_left_out", reason=service.records.unlisted)
    for name in list(coming):
        if service.draining:
            return
        try:
            record = await asyncio.to_thread(service.records.read, name)
            await _register_again(service, record)
            again += 1
        except (EngineClosed, FileNotFoundError, DocumentNotFound):
            # shutdown, or a concurrent deletion of the document
            pass
        except Exception as error:
            reason = str(error.detail if isinstance(error, ApiError) else error)
            service.metrics.left_out.inc()
            service.log.warning("registration_left_out", file=name, reason=reason)
        finally:
            coming.pop(name, None)
    if again:
        service.log.info("registered_again", documents=again)


async def _register_again(service: Service, record: Record) -> None:
    tenants = service.keys.tenants or {""}
    if record.tenant not in tenants:
        raise InvalidRequest(f"tenant {record.tenant!r} has no key here")
    served = [item for item in record.registrations if item.model in service.models]
    if not served:
        raise InvalidRequest(f"no model {record.registrations[0].model!r} is served here")
    caller = Caller(record.tenant, "")
    for number, registration in enumerate(served):
        if number:
            # raises DocumentNotFound after a deletion during the previous registration
            await service.llm.document(record.id, caller.salt)
        async with aclosing(register(service, registration, caller, record, None)) as progress:  # type: ignore[type-var]
            async for _ in progress:
                pass
