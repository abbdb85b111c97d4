"""What keeps the records of registered documents in step with the engine, and registers them again
when a server starts.

A record is written before a registration is answered, and removed before a deletion is. One that
can't be is a line in the log: the document is registered, and gone with the process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from looseleaf.config import IndexConfig
from looseleaf.engine.registered import DocumentInfo
from looseleaf.errors import DocumentNotFound, EngineClosed, InvalidRequest
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import Caller
from looseleaf.server.protocol.documents import RegisterRequest
from looseleaf.server.records import Record, Registration
from looseleaf.server.service import Service


def register(
    service: Service, registration: Registration, caller: Caller, about: Record, most: int | None
) -> AsyncIterator[DocumentInfo]:
    """Have the engine compute a document; ``about`` has its text, and an empty id if it is to get
    one."""
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
    """What a request registers, for one of the models served."""
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


async def keep(service: Service, caller: Caller, record: Record) -> None:
    """Write down what was registered, unless it was deleted meanwhile."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        try:
            info = await service.llm.document(record.id, caller.salt)
        except DocumentNotFound:
            return
        record = record.model_copy(update={"pinned": info.pinned})
        await _tried(service, record.id, lambda: records.write(record))


async def keep_pin(service: Service, caller: Caller, info: DocumentInfo) -> None:
    """Write down whether a document is pinned now."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        await _tried(service, info.id, lambda: records.pin(caller.tenant, info.id, info.pinned))


async def forget(service: Service, caller: Caller, document_id: str) -> None:
    """Remove the record of a document that was deleted, unless it is registered again."""
    records = service.records
    if records.folder is None:
        return
    async with records.lock:
        try:
            await service.llm.document(document_id, caller.salt)
        except DocumentNotFound:
            await _tried(service, document_id, lambda: records.remove(caller.tenant, document_id))


async def _tried(service: Service, document_id: str, action: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(action)
    except (OSError, ValueError) as error:
        service.log.warning("registration_not_kept", id=document_id, reason=str(error))


async def register_again(service: Service) -> None:
    """Register what was registered when the server, or another one on its folder, ran before: one
    document after another, so that requests wait for one at the most. What can't be is told in the
    log, and its file stays."""
    coming, again = service.records.coming, 0
    for name in list(coming):
        if service.draining:
            return
        try:
            record = await asyncio.to_thread(service.records.read, name)
            await _register_again(service, record)
            again += 1
        except (EngineClosed, FileNotFoundError, DocumentNotFound):
            # the server ends, or somebody deletes the document: there is nothing to tell
            pass
        except Exception as error:
            reason = str(error.detail if isinstance(error, ApiError) else error)
            service.log.warning("registration_left_out", file=name, reason=reason)
        finally:
            coming.pop(name, None)
    if again:
        service.log.info("registered_again", documents=again)


async def _register_again(service: Service, record: Record) -> None:
    tenants = service.keys.tenants or {""}
    if record.tenant not in tenants:
        raise InvalidRequest(f"tenant {record.tenant!r} has no key here")
    served = [one for one in record.registrations if one.model in service.models]
    if not served:
        raise InvalidRequest(f"no model {record.registrations[0].model!r} is served here")
    caller = Caller(record.tenant, "")
    for number, registration in enumerate(served):
        if number:
            # deleted while it was computed for the first
            await service.llm.document(record.id, caller.salt)
        async with aclosing(register(service, registration, caller, record, None)) as progress:  # type: ignore[type-var]
            async for _ in progress:
                pass
