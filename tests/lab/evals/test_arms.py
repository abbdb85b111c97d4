"""Arms over the checkpoints that ship, at toy size, and over a server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.config import Fuse
from looseleaf.errors import InvalidOption
from looseleaf.llm.load import reference_model
from looseleaf_lab.errors import EndpointFailed
from looseleaf_lab.evals.arms import EngineArm
from looseleaf_lab.evals.catalog import ARMS
from looseleaf_lab.evals.endpoint import EndpointArm
from looseleaf_lab.evals.run import Runner, Source
from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world_tasks import WorldTask

SEEDS = range(8)
RUNNER = Runner(Source("", ""))


@pytest.fixture(scope="module")
def causal() -> LLM:
    return LLM(reference_model("causal"))


def _right(task: WorldTask, arm: Any) -> float:
    return sum(one.metrics["exact"] for one in RUNNER.run(task, arm, SEEDS))


def test_the_block_checkpoint_looks_facts_up_in_reused_documents() -> None:
    llm = LLM(reference_model("block"))
    assert _right(WorldTask("lookup"), ARMS["reuse"](llm, None)) >= 7


def test_plain_reuse_loses_chains_on_the_causal_checkpoint(causal: LLM) -> None:
    task = WorldTask("chain", hops=2)
    assert _right(task, ARMS["full"](causal, None)) >= 7
    assert _right(task, ARMS["reuse"](causal, None)) <= 3


def test_a_policy_reaches_the_engine_and_reports_what_it_computed(causal: LLM) -> None:
    arm = EngineArm(causal, "links", "lead", fuse=Fuse("links", ratio=0.2))
    scored = RUNNER.run(WorldTask("chain", hops=2), arm, SEEDS)
    assert sum(one.metrics["exact"] for one in scored) >= 6
    assert all(0 < one.answer.report["documents_recomputed"] < 0.3 for one in scored)


def test_prefix_caching_finds_the_first_document_and_answers_as_full_prefill(causal: LLM) -> None:
    task = WorldTask("chain", hops=2)
    whole = RUNNER.run(task, ARMS["full"](causal, None), SEEDS)
    found = RUNNER.run(task, ARMS["prefix"](causal, None), SEEDS)
    assert [one.answer.text for one in found] == [one.answer.text for one in whole]
    # one document of six was there, although the whole prompt was asked before, and the same
    # documents with another question are asked now
    other = RUNNER.run(WorldTask("bridge"), ARMS["prefix"](causal, None), SEEDS)
    found += RUNNER.run(WorldTask("lookup"), ARMS["prefix"](causal, None), SEEDS) + other
    assert all(0.6 < one.answer.report["prompt_computed"] < 0.95 for one in found)


def test_an_answer_is_as_long_as_its_item_allows(causal: LLM) -> None:
    items = [
        Item("1", ("Mira Tolland lives in Quorin.",), "Who lives there?", ("",), n) for n in (1, 4)
    ]
    one, four = EngineArm(causal, "full", "prompt").answer(items)
    assert len(one.text.split()) <= 1 < len(four.text.split())


class _Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.bodies.append((self.path, self.headers.get("Authorization"), body))
        status, reply = server.reply(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = HTTPServer(("127.0.0.1", 0), _Server)
    made.bodies = []
    made.reply = lambda body: (
        200,
        {"choices": [{"message": {"content": str(body["max_tokens"])}}]},
    )
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def _items() -> list[Item]:
    return [Item(str(n), ("one", "two"), "what?", ("",), n, before="first") for n in range(1, 6)]


def test_an_endpoint_is_asked_as_openai_is_and_answers_keep_their_order(server: Any) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    answers = EndpointArm(url, "m", key="k").answer(_items())
    assert [answer.text for answer in answers] == ["1", "2", "3", "4", "5"]
    path, key, body = server.bodies[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert body["messages"] == [{"role": "user", "content": "first\n\none\n\ntwo\n\nwhat?"}]


def test_documents_can_be_sent_as_parts(server: Any) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    EndpointArm(url, "m", documents_as="parts").answer(_items()[:1])
    _, key, body = server.bodies[0]
    kinds = [(part["type"], part["text"]) for part in body["messages"][0]["content"]]
    assert kinds == [("text", "first"), ("document", "one"), ("document", "two"), ("text", "what?")]
    assert key is None


def test_a_server_that_refuses_fails_or_is_not_there_is_named(server: Any) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    server.reply = lambda body: (404, {"error": "no such model"})
    with pytest.raises(EndpointFailed, match=r"404.*no such model"):
        EndpointArm(url, "m").answer(_items()[:1])
    server.reply = lambda body: (200, {"choices": []})
    with pytest.raises(EndpointFailed, match="another shape"):
        EndpointArm(url, "m").answer(_items()[:1])
    with pytest.raises(EndpointFailed, match="check that the server runs"):
        EndpointArm("http://127.0.0.1:1/v1", "m").answer(_items()[:1])
    with pytest.raises(InvalidOption, match="begins with http"):
        EndpointArm("localhost:8000", "m")
