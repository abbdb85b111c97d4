"""Loads: schedules on a clock of the test, and a whole run against a small server."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from looseleaf import LLM
from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.checkpoints import write_random_checkpoint
from looseleaf_lab.bench.endpoint.client import Client
from looseleaf_lab.bench.endpoint.figures import Answer, summarize
from looseleaf_lab.bench.endpoint.in_process import run_in_process
from looseleaf_lab.bench.endpoint.load import closed_loop, open_loop, split
from looseleaf_lab.bench.endpoint.workload import Endpoint, Prompt, Span, make_body, make_prompts


class Clock:
    """Time that moves by `sleep` and `pass_by` only."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_an_open_loop_sends_at_the_schedule_without_waiting_for_answers() -> None:
    clock, sent, release = Clock(), list[tuple[float, float]](), asyncio.Event()

    async def send(prompt: Prompt, start: float) -> Answer:
        sent.append((prompt.at, start))
        if len(sent) == 3:
            release.set()
        await release.wait()
        return Answer(start)

    prompts = [Prompt((), "", 1, at) for at in (0.5, 0.0, 2.0)]
    answers = asyncio.run(open_loop(prompts, send, clock, clock.sleep))
    assert sent == [(0.0, 100.0), (0.5, 100.5), (2.0, 102.0)]
    assert len(answers) == 3
    assert clock.now == 102.0


def test_a_late_client_adds_its_delay_to_the_wait() -> None:
    clock = Clock()

    async def oversleep(seconds: float) -> None:
        clock.now += seconds + 0.25

    async def send(prompt: Prompt, start: float) -> Answer:
        return Answer(start, (clock.now,), 1)

    (answer,) = asyncio.run(open_loop([Prompt((), "", 1, 0.5)], send, clock, oversleep))
    assert answer.chunks[0] - answer.start == 0.25


def test_a_closed_loop_has_at_most_its_streams_in_flight() -> None:
    running, peaks = [0], list[int]()

    async def send(prompt: Prompt) -> Answer:
        running[0] += 1
        peaks.append(running[0])
        await asyncio.sleep(0)
        running[0] -= 1
        return Answer(0.0)

    assert len(asyncio.run(closed_loop([Prompt((), "", 1)] * 7, 3, send))) == 7
    assert max(peaks) == 3


def test_processes_share_streams_and_requests_completely() -> None:
    prompts = make_prompts(10, (Span(3, 5), Span(1, 1)), ["a b", "c"], 2)
    shares = split(Endpoint("http://x", "m"), prompts, 3, 2, 1.0)
    assert [share.streams for share in shares] == [2, 1]
    assert sorted(p.text for share in shares for p in share.prompts) == sorted(
        p.text for p in prompts
    )


def test_documents_are_text_fields_or_ids() -> None:
    prompt = Prompt(("a",), "q", 4)
    text = make_body(Endpoint("http://x", "m"), prompt)
    assert text["messages"] == [{"role": "user", "content": "a\n\nq"}]
    field = make_body(Endpoint("http://x", "m", kind="completions", documents_as="field"), prompt)
    assert (field["prompt"], field["documents"]) == ("q", [{"text": "a"}])
    by_id = make_body(Endpoint("http://x", "m", documents_as="id", ids={"a": "7"}), prompt)
    assert by_id["documents"] == [{"id": "7"}]


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "-5"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        Span.parse(text)


def _chunk(text: str) -> bytes:
    return _frame({"choices": [{"delta": {"content": text}}]})


def _frame(event: object) -> bytes:
    data = b"data: " + (event.encode() if isinstance(event, str) else json.dumps(event).encode())
    return b"%x\r\n%s\n\n\r\n" % (len(data) + 2, data)


_USAGE = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 11}}


async def _ask(script: dict[str, list[tuple[float, bytes]]], clock: Clock) -> dict[str, Answer]:
    """The answer to each prompt of a server that plays its script: steps of time, then bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            text = json.loads(await reader.readexactly(length))["messages"][0]["content"]
            for seconds, data in script[text]:
                clock.now += seconds
                writer.write(data)
                await writer.drain()
                # the client reads this write before the clock moves on
                await read[text].wait()
                read[text].clear()
            if text == "cut":
                writer.close()
                return

    read = {text: asyncio.Event() for text in script}
    active = [""]

    def tick() -> float:
        read[active[0]].set()
        return clock.now

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(Endpoint(f"http://127.0.0.1:{port}/v1", "m"), _ticking(tick), 5.0)
    answers = {}
    for text in script:
        active[0] = text
        answers[text] = await client.stream(Prompt((), text, 4), clock.now)
        read[text].set()
    client.close()
    server.close()
    return answers


def _ticking(tick: Callable[[], float]) -> Callable[[], float]:
    return tick


def test_a_run_against_a_server_with_known_delays() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    end = _frame("[DONE]") + b"0\r\n\r\n"
    script = {
        "good": [(0.5, head + _chunk("a")), (0.25, _chunk("b")), (0.125, _frame(_USAGE) + end)],
        "busy": [(0.0, b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}")],
        "failed": [(0.0, head + _frame({"error": {"message": "no"}}) + end)],
        "cut": [(0.0, head + _chunk("a"))],
    }
    answers = asyncio.run(_ask(script, Clock()))
    good = answers["good"]
    assert good == Answer(100.0, (100.5, 100.75), tokens=4, prompt_tokens=11)
    kinds = [answers[text].error for text in ("busy", "failed", "cut")]
    assert kinds == ["status 429", "error in the stream", "connection"]


def test_prompts_with_a_time_enter_beside_the_streams_and_count_in_first_tokens_only() -> None:
    clock = Clock()

    async def send(prompt: Prompt) -> Answer:
        start = clock.now
        await asyncio.sleep(0)
        ends = (start + 1.0, start + (9.0 if prompt.at else 3.0))
        return Answer(start, ends, 2)

    prompts = [Prompt((), "", 2)] * 2 + [Prompt((), "", 2, 0.5)]
    answers = asyncio.run(closed_loop(prompts, 1, send, clock.sleep))
    assert [answer.entered for answer in answers].count(True) == 1
    figures = summarize(answers)
    assert (figures["requests"], figures["complete"]) == (3, 3)
    assert figures["gap_max_ms"] == 2000.0
    assert figures["output_tokens"] == 2.0


def test_a_run_without_a_server_has_the_tokens_of_its_prompts(tmp_path: Path) -> None:
    folder = write_random_checkpoint("tiny", tmp_path)
    prompts = make_prompts(5, (Span(4, 9), Span(3, 6)), ["a b", "c"], 2)
    prompts[4] = replace(prompts[4], at=1e-6)
    with LLM(folder, device="cpu") as llm:
        answers = run_in_process(llm, prompts, 2)
    assert sorted(a.tokens for a in answers) == sorted(p.output for p in prompts)
    assert [len(a.chunks) for a in answers] == [a.tokens for a in answers]
    assert sum(a.entered for a in answers) == 1
