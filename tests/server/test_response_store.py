"""The table of stored responses: bounded, by tenant, and in chains."""

import asyncio
import random
import socket
from typing import Any

import pytest
from pydantic import ValidationError

from looseleaf.server.processes.control import (
    Control,
    FromProcess,
    Restored,
    Store,
    Stored,
    ToProcess,
)
from looseleaf.server.processes.responses import MAX_CALLS, RemoteStore, answer_store
from looseleaf.server.protocol.responses import ResponsesRequest
from looseleaf.server.response_store import RECORD_BYTES, ResponseTable

RECORD = b"x" * RECORD_BYTES
"""Counts twice its length."""


def table(records: int) -> ResponseTable:
    return ResponseTable(records * 2 * RECORD_BYTES)


def test_a_chain_is_read_from_its_beginning() -> None:
    records = table(8)
    for number in range(4):
        previous = f"r{number - 1}" if number else None
        assert records.put("red", f"r{number}", str(number).encode(), previous)
    assert records.chain("red", "r3") == [b"0", b"1", b"2", b"3"]
    assert records.chain("red", "r1") == [b"0", b"1"]
    assert records.get("red", "r2") == b"2"
    assert records.chain("red", "r4") is None


def test_a_chain_with_a_deleted_record_is_gone() -> None:
    records = table(8)
    records.put("red", "a", RECORD, None)
    records.put("red", "b", RECORD, "a")
    assert records.delete("red", "a") and not records.delete("red", "a")
    assert records.chain("red", "b") is None and records.get("red", "b") == RECORD


def test_the_end_of_a_conversation_is_dropped_before_its_beginning() -> None:
    records = table(3)
    records.put("red", "a", RECORD, None)
    records.put("red", "b", RECORD, "a")
    records.put("red", "c", RECORD, "b")
    records.put("red", "other", RECORD, None)
    assert records.chain("red", "b") == [RECORD, RECORD] and records.get("red", "c") is None


def test_a_conversation_that_outgrows_the_table_is_not_kept() -> None:
    records = table(3)
    kept = [
        records.put("red", f"r{number}", RECORD, f"r{number - 1}" if number else None)
        for number in range(4)
    ]
    assert kept == [True, True, True, False]
    assert records.chain("red", "r2") == [RECORD] * 3


def test_a_tenant_with_few_records_keeps_them() -> None:
    records = table(4)
    records.put("blue", "mine", RECORD, None)
    for number in range(20):
        records.put("red", f"r{number}", RECORD, None)
    assert records.get("blue", "mine") == RECORD
    assert records.get("red", "mine") is None and records.get("red", "r19") == RECORD


@pytest.mark.parametrize("limit", [0, 1, RECORD_BYTES])
def test_a_record_above_the_limit_is_not_kept(limit: int) -> None:
    records = ResponseTable(limit)
    assert not records.put("red", "a", RECORD, None)
    assert records.size == 0 and records.get("red", "a") is None


def test_the_limit_holds_for_any_calls() -> None:
    records, draw = ResponseTable(20 * RECORD_BYTES), random.Random(0)
    kept: dict[tuple[str, str], bytes] = {}
    for number in range(2000):
        tenant, name = draw.choice("abc"), f"r{draw.randrange(40)}"
        previous = draw.choice([None, f"r{number}-older"])
        match draw.randrange(4):
            case 0 | 1:
                content = bytes(draw.randrange(4 * RECORD_BYTES))
                assert records.put(tenant, name, content, previous)
                kept[tenant, name] = content
            case 2:
                content = records.get(tenant, name) or b""
                assert not content or content == kept[tenant, name]
            case _:
                records.delete(tenant, name)
                assert records.get(tenant, name) is None
        assert records.size <= records.max_bytes
    for tenant, name in kept:
        records.delete(tenant, name)
    assert records.size == 0


def test_a_process_calls_the_table_of_its_parent() -> None:
    records = table(4)
    assert answer_store(records, Store(1, "put", "red", "a", b"1")).is_done
    assert answer_store(records, Store(2, "put", "red", "b", b"2", "a")).is_done
    assert answer_store(records, Store(3, "get", "red", "b")).contents == [b"2"]
    assert answer_store(records, Store(4, "chain", "red", "b")).contents == [b"1", b"2"]
    assert answer_store(records, Store(5, "delete", "red", "a")).is_done
    assert answer_store(records, Store(6, "chain", "red", "b")).contents is None
    assert answer_store(records, Store(7, "get", "red", "a")).contents is None


def test_a_process_has_few_calls_in_flight_also_after_cancelled_calls() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        calls, full, marked = asyncio.Queue[Store](), asyncio.Event(), asyncio.Event()

        def take(message: Any) -> None:
            if isinstance(message, Restored):
                marked.set()
                return
            calls.put_nowait(message)
            if calls.qsize() == MAX_CALLS:
                full.set()

        parent = Control(ours, FromProcess, take, lambda: None)
        child = Control(theirs, ToProcess, lambda answer: store.take(answer), lambda: None)
        store = RemoteStore(child)
        names = [str(number) for number in range(3 * MAX_CALLS)]
        tasks = [asyncio.create_task(store.get("red", name)) for name in names]
        await full.wait()
        for task in tasks[:MAX_CALLS]:
            task.cancel()
        await asyncio.wait(tasks[:MAX_CALLS])
        # the parent has read all earlier messages when it gets this one
        child.send(Restored())
        await marked.wait()
        for _ in names:
            assert calls.qsize() <= MAX_CALLS
            call = await calls.get()
            parent.send(Stored(call.number, [call.name.encode()]))
        contents = await asyncio.gather(*tasks[MAX_CALLS:])
        assert contents == [name.encode() for name in names[MAX_CALLS:]]
        parent.close()
        child.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    "metadata",
    [
        {str(number): "" for number in range(17)},
        {"k" * 65: ""},
        {"a": "v" * 513},
        {"a": ["v" * 513]},
    ],
    ids=["pairs", "key", "value", "list"],
)
def test_metadata_of_a_response_is_short(metadata: dict[str, Any]) -> None:
    longest = {f"{number:064}": "v" * 512 for number in range(16)}
    for accepted in ({}, {"user_id": None}, longest):
        body = ResponsesRequest(model="m", input="x", metadata=accepted)
        assert body.metadata == accepted
    with pytest.raises(ValidationError, match="metadata"):
        ResponsesRequest(model="m", input="x", metadata=metadata)


@pytest.mark.parametrize("field", ["prompt_cache_key", "safety_identifier", "user"])
def test_labels_that_a_response_repeats_are_short(field: str) -> None:
    fields: dict[str, Any] = {"model": "m", "input": "x"}
    assert ResponsesRequest(**fields, **{field: "v" * 1024})
    with pytest.raises(ValidationError, match=field):
        ResponsesRequest(**fields, **{field: "v" * 1025})
