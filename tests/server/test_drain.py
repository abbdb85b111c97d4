"""SIGTERM in the middle of work: what was accepted ends whole, what was not is refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from looseleaf.server.run import EXIT_CUT
from tests.server.live import DOCUMENT, chat_body

RUN = "\nfrom looseleaf.cli import main; main()"
SOURCE = str(Path(__file__).parents[2] / "src")


def started(*arguments: str, plant: str = "") -> tuple[subprocess.Popen[str], str]:
    """``looseleaf serve`` in a process of its own, and its address, from its log; ``plant`` is run
    there before."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
    if plant:
        # a planted fault needs the engine in the same process
        environment["LOOSELEAF_API_PROCESSES"] = "0"
    process = subprocess.Popen(
        [sys.executable, "-c", plant + RUN, "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "listening":
            return process, event["url"]
    raise AssertionError(f"the server ended with {process.wait()}")


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> list[Any]:
    """The events of one stream; ``begun`` is set with its first."""
    body = chat_body(
        stream=True,
        documents=[{"text": f"{DOCUMENT} {number % 3}"}],
        max_tokens=150,
        ignore_eos=True,
    )
    events = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                begun.set()
    return events


async def load_and_end(process: subprocess.Popen[str], url: str) -> list[list[Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, trust_env=False, limits=limits
    ) as client:
        begun = [asyncio.Event() for _ in range(24)]
        tasks = [asyncio.create_task(read(client, n, e)) for n, e in enumerate(begun)]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not any(task.done() for task in tasks)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)


def test_sigterm_in_the_middle_of_streams_cuts_none_of_them() -> None:
    process, url = started()
    try:
        streams = asyncio.run(load_and_end(process, url))
        for events in streams:
            assert events[-1] == "[DONE]"
            last = json.loads(events[-2])
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["looseleaf"]["attention"]["decode_steps"] >= 149
        assert process.stderr is not None
        log = [json.loads(line) for line in process.stderr]
        assert [e["whole"] for e in log if e["event"] == "stopped"] == [True]
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def cut_off(process: subprocess.Popen[str], url: str) -> tuple[list[Any], httpx.Response]:
    """The events of a stream and a whole answer, neither of which can end in time."""
    options = {"max_tokens": 3800, "ignore_eos": True, "n": 8, "temperature": 1}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        asked = client.post("/v1/chat/completions", json=chat_body(**options))
        whole = asyncio.create_task(asked)
        events: list[Any] = []
        body = chat_body(stream=True, **options)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line and not events:
                    process.send_signal(signal.SIGTERM)
                if line:
                    events.append(line.removeprefix("data: "))
        return events, await whole


def test_a_drain_that_runs_out_tells_those_whom_it_cuts_off_and_the_log() -> None:
    process, url = started("--drain-seconds", "0.5")
    try:
        events, whole = asyncio.run(cut_off(process, url))
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "shutting_down"
        assert process.stderr is not None
        log = [json.loads(line) for line in process.stderr]
        assert [e["whole"] for e in log if e["event"] == "stopped"] == [False]
        assert not [e for e in log if e["level"] == "error"]
        assert process.wait(30) == EXIT_CUT
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_ctrl_c_ends_a_server_in_peace() -> None:
    process, _ = started()
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    events = [json.loads(line) for line in log.splitlines()]
    assert [event["whole"] for event in events if event["event"] == "stopped"] == [True]


def refused(*arguments: str, **environment: str) -> str:
    """The sentence with which ``looseleaf serve`` ends before it listens."""
    done = subprocess.run(
        [sys.executable, "-m", "looseleaf", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_server_without_keys_does_not_listen_to_other_machines() -> None:
    assert "API keys are needed" in refused("--host", "0.0.0.0")
