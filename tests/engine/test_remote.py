"""An engine at the other end of a socket: answers, errors and documents as in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from looseleaf import AsyncLLM, Document, Grammar, SamplingParams
from looseleaf.config import Fuse, Select
from looseleaf.errors import (
    DocumentNotFound,
    EngineLost,
    InvalidRequest,
    LimitExceeded,
    PromptTooLong,
)
from looseleaf.llm.client import EngineClient, Output
from looseleaf.llm.remote import host as host_module
from looseleaf.llm.remote.client import RemoteEngine
from looseleaf.llm.remote.host import EngineHost
from looseleaf.llm.remote.link import Link
from looseleaf.llm.remote.registered_cache import RegisteredCache
from looseleaf.llm.remote.wire import DocumentCache, Reply, Step, open_message, request_of
from looseleaf.llm.remote.wire_error import error_from_wire, error_to_wire
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, drawn, words
from tests.engine.test_async import LEAD, A, B, engine, run

pytestmark = pytest.mark.usefixtures("unchecked")

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "several": drawn(3, max_tokens=10, n=3),
    "stop string": drawn(4, max_tokens=40, stop=["e", "th"]),
    "stop string kept": drawn(4, max_tokens=40, stop=["e"], include_stop_str_in_output=True),
    "several, stopped": drawn(5, max_tokens=30, n=3, stop=["e", "a"], min_tokens=2),
    "stop token": SamplingParams(seed=6, max_tokens=40, stop_token_ids=range(0, 256, 7)),
    "logprobs": drawn(7, max_tokens=30, logprobs=2, stop=["o"]),
    "prompt scores": drawn(7, prompt_logprobs=1, prompt_logprobs_start=4),
    "no tokens": SamplingParams(max_tokens=0, prompt_logprobs=0),
    "grammar": SamplingParams(seed=8, max_tokens=20, grammar=Grammar.regex("[ab]{3,9}c")),
    "bias and penalty": drawn(9, logit_bias={40: 5.0}, repetition_penalty=1.3),
}


@asynccontextmanager
async def linked(llm: AsyncLLM) -> AsyncIterator[tuple[RemoteEngine, EngineHost]]:
    """An engine in this process, used over a socket."""
    host, remote = EngineHost(llm), RemoteEngine(llm.tokenizer, llm.facts)
    ours, theirs = socket.socketpair()
    host.connect(ours)
    remote.attach(theirs)
    try:
        yield remote, host
    finally:
        remote.close()
        host.close()


async def last(llm: EngineClient, request: Request) -> Output:
    output: Output | None = None
    async for output in llm.stream(request):
        texts = [completion.text for completion in output.outputs]
        assert texts is not None
    assert output is not None and output.finished
    return output


def visible(output: Output) -> Any:
    """Everything that a client may see of an answer, besides times."""
    outputs = [
        (o.index, o.text, tuple(o.token_ids), o.finish_reason, o.stop_reason, ranked(o.logprobs))  # type: ignore[attr-defined]
        for o in output.outputs
    ]
    scores = [score and ranked([score]) for score in output.prompt_logprobs or ()]
    return outputs, list(output.prompt_token_ids), output.reuse.text_tokens, scores


def ranked(logprobs: Any) -> Any:
    """Log-probabilities without the digits that depend on the batch."""
    return logprobs and [
        [(token.token_id, token.rank, round(token.logprob, 2)) for token in entry]
        for entry in logprobs
    ]


def test_answers_are_those_of_the_engine_in_one_process(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            parts = llm.prompts.from_parts([LEAD, A, B, words(10, 4)])
            requests = [Request(name, parts, params) for name, params in PARAMS.items()]
            expected = [visible(await last(llm, request)) for request in requests]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(last(remote, request)) for request in requests]
            for request, answer, task in zip(requests, expected, tasks, strict=True):
                assert visible(task.result()) == answer, request.request_id
        assert any(finish == "stop" for outputs, *_ in expected for _, _, _, finish, *_ in outputs)

    with engine(checkpoint) as llm:
        run(scenario)


def test_errors_and_documents_cross_the_link(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            long = remote.prompts.from_parts([words(1, 4000)])
            with pytest.raises(PromptTooLong, match="context"):
                await last(remote, Request("long", long, PARAMS["greedy"]))
            bad = replace(PARAMS["greedy"], grammar=Grammar.regex("(("))
            short = remote.prompts.from_parts([words(1, 9)])
            with pytest.raises(InvalidRequest, match="regular expression"):
                await last(remote, Request("bad", short, bad))
            document = Document(words(5, 60), name="title")
            infos = [info async for info in remote.register(document, document_id="d", salt="s")]
            assert infos[-1].state == "ready" and (await remote.document("d", "s")).id == "d"
            assert [info.id for info in await remote.documents("s")] == ["d"]
            (copy,) = await asyncio.to_thread(remote.registered, ["d"], "s")
            assert (copy.text, copy.name) == (document.text, "title")
            assert (await asyncio.to_thread(remote.registered, ["d"], "s"))[0] is copy
            with pytest.raises(DocumentNotFound):
                await asyncio.to_thread(remote.registered, ["d"], "other salt")
            assert (await remote.pin("d", "s")).pinned
            await remote.writes_done()
            # deleted in another process that uses the engine
            await llm.delete("d", "s")
            with pytest.raises(DocumentNotFound):
                await asyncio.to_thread(remote.registered, ["d"], "s")

    with engine(checkpoint) as llm:
        run(scenario)


def test_a_lookup_beside_a_deletion_leaves_no_copy(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            document = Document(words(5, 60))
            async for _info in remote.register(document, document_id="d", salt="s"):
                pass
            # the engine answers the lookup first
            (copy,), _info = await asyncio.gather(remote._find(["d"], "s"), remote.delete("d", "s"))
            assert copy.text == document.text
            assert remote._documents.get(("d", "s")) == (None, None)

    with engine(checkpoint) as llm:
        run(scenario)


def test_registered_documents_arrive_in_short_replies(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, send, drained = list[Any](), Link.send, Link.drained

    def noted_send(link: Link, message: Any) -> None:
        if isinstance(message, Reply):
            events.append(message.value and len(message.value))
        send(link, message)

    async def noted_drained(link: Link) -> None:
        events.append("drained")
        await drained(link)

    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            ids = ["a", "b", "c", "d", "e"]
            documents = [Document(words(5, 60), name=name) for name in ids]
            for name, document in zip(ids, documents, strict=True):
                async for _info in remote.register(document, document_id=name):
                    pass
            await remote._find(["b"], "")
            stored = llm.engine.documents.get("a", "")
            size = len(documents[0].texts[0]) + 4 * len(stored.token_ids or ())
            # two documents reach the limit
            monkeypatch.setattr(host_module, "REPLY_BYTES", size + 1)
            monkeypatch.setattr(Link, "send", noted_send)
            monkeypatch.setattr(Link, "drained", noted_drained)
            copies = await remote._find(ids, "")
            assert [copy.name for copy in copies] == ids
            assert {copy.text for copy in copies} == {documents[0].text}
            # "b" is a copy that the process has already
            assert events == [3, "drained", 2, "drained", None]
            events.clear()
            assert await remote._find(ids, "") == copies
            assert events == [5, None]

    with engine(checkpoint) as llm:
        run(scenario)


def test_a_deletion_between_replies_is_an_error_and_leaves_no_copy(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "REPLY_BYTES", 1)

    async def scenario() -> None:
        async def delete(_: Link) -> None:
            await llm.delete("b", "")

        async with linked(llm) as (remote, _):
            for name in "ab":
                async for _info in remote.register(Document(words(5, 60)), document_id=name):
                    pass
            monkeypatch.setattr(Link, "drained", delete)
            with pytest.raises(DocumentNotFound):
                await remote._find(["a", "b"], "")
            assert [remote._documents.get((name, "")) for name in "ab"] == [(None, None)] * 2

    with engine(checkpoint) as llm:
        run(scenario)


def test_the_latest_registered_documents_are_kept_up_to_a_limit() -> None:
    cache, texts = RegisteredCache(10_000), {name: name * 3000 for name in "abcd"}
    for name in "abc":
        cache.put((name, ""), 1, Document(texts[name]))
    assert cache.get(("a", ""))[0] == 1
    # again, as a document whose edition has changed
    cache.put(("c", ""), 2, Document(texts["c"]))
    cache.put(("d", ""), 1, Document(texts["d"]))
    assert [cache.get((name, ""))[0] for name in "abcd"] == [1, None, 2, 1]
    # ids count too
    cache.put(("ids", ""), 1, Document("x", token_ids=(5,) * 1000))
    assert [cache.get((name, ""))[0] for name in ("a", "c", "d", "ids")] == [None] * 3 + [1]
    cache.clear()
    cache.put(("a", ""), 1, Document(texts["a"]))
    cache.put(("b", ""), 1, Document(texts["b"]))
    assert cache.get(("a", ""))[0] == cache.get(("b", ""))[0] == 1


def test_a_step_is_one_message_for_all_streams_of_a_link(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, send = list[Step](), Link.send

    def noted(link: Link, message: Any) -> None:
        if isinstance(message, Step):
            steps.append(message)
        send(link, message)

    monkeypatch.setattr(Link, "send", noted)

    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            parts = remote.prompts.from_parts([words(1, 9)])
            requests = [Request(f"{n}", parts, drawn(n, max_tokens=20)) for n in range(8)]
            await asyncio.gather(*(last(remote, request) for request in requests))
            assert len(steps) <= llm.engine.counters.steps
            assert max(len(step.deltas) for step in steps) == 8
            assert sum(len(delta.tokens) for step in steps for delta in step.deltas) == 160

    with engine(checkpoint) as llm:
        run(scenario)


def test_a_slow_reader_gets_one_update_for_many_steps(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with linked(llm) as (remote, _):
            parts = remote.prompts.from_parts([words(1, 9)])
            stream = remote.stream(Request("slow", parts, drawn(1, max_tokens=30)))
            await anext(stream)
            # meanwhile the engine completes the answer
            await llm._calls.watch(lambda: not llm.engine.has_work or None)
            await remote.documents()
            updates = [len(output.token_ids) async for output in stream]
            assert updates == [30]

    with engine(checkpoint) as llm:
        run(scenario)


def test_a_lost_link_ends_the_requests_on_both_sides(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with linked(llm) as (remote, host):
            parts = remote.prompts.from_parts([words(1, 9)])
            endless = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
            stream = remote.stream(Request("endless", parts, endless))
            await anext(stream)
            host.close()
            with pytest.raises(EngineLost, match="ask again"):
                async for _ in stream:
                    pass
            assert not remote.is_open
            with pytest.raises(EngineLost):
                await remote.documents()
            await llm._calls.watch(lambda: not llm.engine.has_work or None)
            # the engine starts again
            ours, theirs = socket.socketpair()
            host.connect(ours)
            remote.attach(theirs)
            await last(remote, Request("again", parts, PARAMS["greedy"]))

    with engine(checkpoint) as llm:
        run(scenario)


def test_requests_and_errors_are_equal_after_a_round_trip() -> None:
    request = Request(
        "name",
        (),
        drawn(1, stop=["x"], logit_bias={3: 1.0}),
        "salt",
        2.0,
        fuse=Fuse("deviation", check_layers=(1, 2)),
        select=Select("quest"),
    )
    assert request_of(open_message(request, 1, 0.0), DocumentCache()) == replace(
        request, decodes=False
    )
    for error in (LimitExceeded("grammar", "too slow"), PromptTooLong("long", "max_model_len")):
        copy = error_from_wire(error_to_wire(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
