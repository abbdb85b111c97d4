"""Registered documents over several replicas: one registration serves requests everywhere."""

import asyncio
import json

from looseleaf.proxy.registered import RegisteredBodies
from tests.proxy.fakes import FakeFleet, answers, client, proxy, refuses, streams

TEXT = "Mira Tolland signs travel requests."


class Server:
    """Registered documents of one replica, as `looseleaf serve` keeps them."""

    def __init__(self, **documents):
        self.documents, self.asked = dict(documents), 0

    def __call__(self, call):
        if call.method == "POST" and call.route == "/v1/documents":
            body = json.loads(call.body)
            name = body.get("id") or "doc-1"
            self.documents[name] = len(self.documents)
            if body.get("stream"):
                return streams(f'data: {{"id": "{name}"}}\n\n'.encode(), b"data: [DONE]\n\n")
            return answers(201, self.entry(name))
        if call.route == "/v1/documents":
            data = [self.entry(name) for name in self.documents]
            return answers(200, {"data": data, "has_more": False, "last_id": None})
        if call.route.startswith("/v1/documents/"):
            name = call.route.split("/")[3]
            if name not in self.documents:
                return refuses(404, "document_not_found")
            if call.method == "DELETE":
                del self.documents[name]
            return answers(200, {"id": name})
        self.asked += 1
        missing = [d for d in json.loads(call.body)["documents"] if d["id"] not in self.documents]
        return refuses(404, "document_not_found") if missing else answers(200, {"id": "answer"})

    def entry(self, name):
        return {"id": name, "created": self.documents[name], "state": "ready"}


def session(replicas, steps, *, headers=None):
    """The responses of one proxy to ``steps``: method, path and body each."""
    fleet = FakeFleet(replicas)

    async def run():
        async with client(proxy(fleet)) as http:
            return [
                await http.request(method, path, json=body, headers=headers)
                for method, path, body in steps
            ]

    return asyncio.run(run()), fleet


def ask(*ids):
    return "POST", "/v1/completions", {"prompt": "Who?", "documents": [{"id": i} for i in ids]}


def register(**fields):
    return "POST", "/v1/documents", {"text": TEXT, **fields}


def test_a_document_is_sent_again_to_a_replica_without_it():
    first, second = Server(), Server()
    replicas = {"a": first, "b": second}
    (made, answer), _ = session(replicas, [register(id="x"), ask("x")])
    assert made.status_code == 201 and answer.status_code == 200

    fleet = FakeFleet(replicas)

    async def run():
        async with client(proxy(fleet)) as http:
            await http.request(*register(id="y")[:2], json=register(id="y")[2])
            # the replica loses its documents
            first.documents.clear()
            method, path, body = ask("y")
            return await http.request(method, path, json=body)

    assert asyncio.run(run()).status_code == 200
    assert "y" in first.documents and "y" not in second.documents
    again = json.loads(fleet.calls[-2][1].body)
    assert again == {"text": TEXT, "id": "y", "wait": True, "stream": False}


def test_ids_of_servers_are_learned_also_from_streams():
    for fields in ({}, {"stream": True}):
        server = Server()
        fleet = FakeFleet({"a": server})
        app = proxy(fleet)

        async def run(app=app, fields=fields, server=server):
            async with client(app) as http:
                method, path, body = register(**fields)
                await http.request(method, path, json=body)
                server.documents.clear()
                method, path, body = ask("doc-1")
                return await http.request(method, path, json=body)

        assert asyncio.run(run()).status_code == 200


def test_a_document_that_only_another_replica_has_is_asked_there():
    (answer,), fleet = session({"a": Server(), "b": Server(x=1)}, [ask("x")])
    assert answer.status_code == 200
    assert [replica for replica, _ in fleet.calls] == ["a", "b"]


def test_an_unknown_document_is_an_error():
    (answer,), _ = session({"a": Server(), "b": Server()}, [ask("x")])
    assert answer.status_code == 404


def test_reads_merge_and_deletions_reach_all():
    replicas = {"a": Server(x=1, y=3), "b": Server(y=3, z=2)}
    steps = [
        ("GET", "/v1/documents", None),
        ("GET", "/v1/documents?limit=1&after=x", None),
        ("GET", "/v1/documents?after=none", None),
        ("GET", "/v1/documents/z", None),
        ("DELETE", "/v1/documents/y", None),
        ("GET", "/v1/documents/y", None),
        ("DELETE", "/v1/documents/y", None),
    ]
    responses, _ = session(replicas, steps)
    listing, page, unknown, one, deleted, gone, again = responses
    assert [entry["id"] for entry in listing.json()["data"]] == ["x", "z", "y"]
    assert page.json()["first_id"] == "z" and page.json()["has_more"] is True
    assert unknown.status_code == 404 and one.status_code == deleted.status_code == 200
    assert gone.status_code == again.status_code == 404


def test_a_deleted_document_is_not_sent_again():
    steps = [register(id="x"), ("DELETE", "/v1/documents/x", None), ask("x")]
    (_, _, answer), _ = session({"a": Server()}, steps)
    assert answer.status_code == 404


def test_keys_share_no_registrations():
    bodies = RegisteredBodies(100)
    bodies.keep("red", "x", b"1")
    assert bodies.get("blue", "x") is None and bodies.get("red", "x") == b"1"


def test_registrations_are_bounded():
    bodies = RegisteredBodies(10)
    for name in "abc":
        bodies.keep("", name, b"1234")
        bodies.get("", "a")
    assert [name for name in "abc" if bodies.get("", name)] == ["a", "c"]
    bodies.keep("", "large", b"1" * 11)
    assert bodies.get("", "large") is None and len(bodies) == 2
