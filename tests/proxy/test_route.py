"""`looseleaf route` in front of real servers: documents stay at their replica, and kill -9 of a
replica costs retries and errors that say so."""

import json
import threading
import time

import httpx
import pytest

from tests.proxy.processes import fleet

CHAT = "/v1/chat/completions"
MODEL = "looseleaf-reference"


def body(number, **fields):
    text = f"Mira Tolland signs the travel requests of department {number}. " * 4
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who signs?"}],
        "documents": [{"text": text}],
        "temperature": 0,
        "max_tokens": 4,
        **fields,
    }


def sources(response):
    assert response.status_code == 200, response.text
    return [d["source"] for d in response.json()["looseleaf"]["documents"]]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with (
        fleet(tmp_path_factory.mktemp("fleet"), 2) as (proxy, servers),
        httpx.Client(base_url=proxy.url, timeout=60, trust_env=False) as client,
    ):
        while client.get("/ready").json()["replicas"] < 2:
            time.sleep(0.05)
        yield client, servers


def test_a_document_is_computed_once(running):
    client, servers = running
    first = [sources(client.post(CHAT, json=body(number))) for number in range(8)]
    again = [sources(client.post(CHAT, json=body(number))) for number in range(8)]
    assert first == [["computed"]] * 8 and again == [["cached"]] * 8
    held = [httpx.get(f"{server.url}/v1/holdings").json()["documents"] for server in servers]
    assert sum(map(len, held)) == 8 and all(held)


def test_a_registered_document_is_read_by_its_id(running):
    client, _ = running
    text = "The archive is in the north wing. " * 4
    made = client.post("/v1/documents", json={"id": "archive", "text": text})
    assert made.status_code == 201
    question = body(0, documents=[{"id": "archive"}])
    assert sources(client.post(CHAT, json=question)) == [["cached"]][0]
    assert [d["id"] for d in client.get("/v1/documents").json()["data"]] == ["archive"]
    assert client.delete("/v1/documents/archive").status_code == 200
    assert client.post(CHAT, json=question).status_code == 404


def test_kill_of_a_replica_loses_only_its_streams(running):
    """The last test: one replica ends."""
    client, servers = running
    begun, enough, ends = threading.Barrier(9, timeout=60), threading.Event(), []

    def stream(number):
        fields = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        with client.stream("POST", CHAT, json=body(number, **fields)) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            begun.wait()
            last = ""
            for line in lines:
                last = line
                if enough.is_set():
                    break
            ends.append(last)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    servers[0].kill()
    answers = [client.post(CHAT, json=body(number)) for number in range(8)]
    enough.set()
    for thread in threads:
        thread.join(60)
    assert {answer.status_code for answer in answers} == {200}
    assert client.get("/ready").json()["replicas"] == 1
    lost = [json.loads(line.removeprefix("data: ")) for line in ends if "replica_lost" in line]
    assert len(ends) == 8 and 0 < len(lost) < 8
    assert all("again" in event["error"]["message"] for event in lost)
