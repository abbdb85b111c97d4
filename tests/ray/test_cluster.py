"""A real Ray on loopback: documents stay at their replica, and kill -9 of a replica loses only its
streams."""

import json
import os
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
import ray

CHAT = "/v1/chat/completions"
OPTIONS = {"replicas": 2, "num_pages": 256, "dtype": "float32", "device": "cpu", "num_cpus": 1}


def body(number, **fields):
    text = f"Mira Tolland signs the travel requests of department {number}. " * 4
    return {
        "model": "looseleaf-reference",
        "messages": [{"role": "user", "content": "Who signs?"}],
        "documents": [{"text": text}],
        "temperature": 0,
        "max_tokens": 4,
        **fields,
    }


def sources(response):
    assert response.status_code == 200, response.text
    return [d["source"] for d in response.json()["looseleaf"]["documents"]]


def engine_processes():
    """The replicas' processes, all begun by this test."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "ServeReplica:default:Engine" in child.name()
            or any("ServeReplica:default:Engine" in part for part in child.cmdline())]  # fmt: skip


@pytest.fixture(scope="module")
def client():
    from ray import serve

    from looseleaf.ray import app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "src")}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(OPTIONS))
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as made:
        end = time.monotonic() + 30
        while made.get("/ready").json()["replicas"] < 2 and time.monotonic() < end:
            time.sleep(0.1)
        yield made
    serve.shutdown()
    ray.shutdown()


def test_a_document_is_computed_once(client):
    first = [sources(client.post(CHAT, json=body(number))) for number in range(8)]
    again = [sources(client.post(CHAT, json=body(number))) for number in range(8)]
    assert first == [["computed"]] * 8 and again == [["cached"]] * 8


def test_the_whole_api_passes(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "looseleaf-reference"
    response = client.post(CHAT, json={}, headers={"x-request-id": "mine"})
    assert response.status_code == 400
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert client.get("/nowhere").status_code == 404
    text = "The archive is in the north wing. " * 4
    assert client.post("/v1/documents", json={"id": "archive", "text": text}).status_code == 201
    question = body(0, documents=[{"id": "archive"}])
    assert client.post(CHAT, json=question).status_code == 200
    assert [d["id"] for d in client.get("/v1/documents").json()["data"]] == ["archive"]
    assert client.delete("/v1/documents/archive").status_code == 200
    assert client.post(CHAT, json=question).status_code == 404


def test_kill_of_a_replica_loses_only_its_streams(client):
    """The last test: one replica ends, and Ray starts another."""
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
    victim, *others = engine_processes()
    assert others
    victim.send_signal(signal.SIGKILL)
    answers = [client.post(CHAT, json=body(number)) for number in range(8)]
    enough.set()
    for thread in threads:
        thread.join(60)
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers]
    lost = [json.loads(line.removeprefix("data: ")) for line in ends if "replica_lost" in line]
    assert len(ends) == 8 and 0 < len(lost) < 8
    assert all("again" in event["error"]["message"] for event in lost)
