"""Limits for clients: slow bodies, unread answers, open connections, and requests per key."""

import asyncio
import json

import httpx

from looseleaf.config import ServerConfig
from looseleaf.config.route import RouteConfig
from looseleaf.proxy import app as app_module
from looseleaf.proxy.run import ProxyServer
from looseleaf.server.stalled import Connection
from tests.proxy.fakes import FakeFleet, answers, client, proxy, refuses, streams

CHAT = "/v1/chat/completions"
SCOPE = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
GOOD = answers(200, {"id": "good"})


def good(call):
    return GOOD


async def forever(*_):
    await asyncio.Event().wait()


def served(app, receive, send):
    asyncio.run(asyncio.wait_for(app(SCOPE, receive, send), 10))


def send_all(app, requests):
    """The statuses of requests, each a key and a path, one after another."""

    async def run():
        async with client(app) as http:
            return [
                (await http.post(path, json={}, headers={"Authorization": key})).status_code
                for key, path in requests
            ]

    return asyncio.run(run())


def test_the_limit_of_connections_is_that_of_the_servers():
    assert RouteConfig().max_connections == ServerConfig().max_connections


def test_a_body_arrives_in_its_time(monkeypatch):
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.1)
    messages, fleet = [], FakeFleet({"a": good})

    async def drip():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message):
        messages.append(message)

    served(proxy(fleet), drip, send)
    assert messages[0]["status"] == 408 and (b"connection", b"close") in messages[0]["headers"]
    assert json.loads(messages[1]["body"])["error"]["code"] == "slow_body" and not fleet.calls


def test_a_client_that_stops_reading_ends_its_call(monkeypatch):
    monkeypatch.setattr(app_module, "STALL_SECONDS", 0.1)
    fleet, messages = FakeFleet({"a": lambda call: streams(b"data: 1\n\n")}), []
    bodies = iter([{"type": "http.request", "body": b"{}"}])

    async def receive():
        return next(bodies, None) or await forever()

    async def send(message):
        messages.append(message)
        if message["type"] == "http.response.body":
            await forever()

    served(proxy(fleet), receive, send)
    assert [m["type"] for m in messages] == ["http.response.start", "http.response.body"]
    assert fleet.closed == ["a"]


def test_new_connections_replace_idle_ones():
    config = RouteConfig(port=0, max_connections=2)

    async def run():
        app = proxy(FakeFleet({"a": good}))
        app.log = Log()
        server = ProxyServer(app, config)
        serving = asyncio.create_task(server.serve())
        await asyncio.wait_for(app.log.listening.wait(), 10)
        idle = [await asyncio.open_connection("127.0.0.1", server.bound_port) for _ in range(3)]
        # the oldest connection ends without a request
        assert await asyncio.wait_for(idle[0][0].read(), 10) == b""
        assert all(isinstance(c, Connection) for c in server.server_state.connections)
        url = f"http://127.0.0.1:{server.bound_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            text = (await http.get("/metrics")).text
        for _, writer in idle:
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
        return text

    # the connection of the metrics replaces another one
    assert "looseleaf_route_refused_connections_total 2.0" in asyncio.run(run())


class Log:
    """A log that reports the open port."""

    def __init__(self):
        self.listening = asyncio.Event()

    def info(self, event, **_):
        self.listening.set()

    def warning(self, *_, **__): ...


def test_a_key_counts_before_its_first_answer_has_ended():
    async def run():
        fleet, begun, release = FakeFleet({"a": good}), asyncio.Event(), asyncio.Event()
        send = fleet.send

        async def hold(replica, call, affinity):
            begun.set()
            await release.wait()
            return await send(replica, call, affinity)

        fleet.send = hold
        headers = {"Authorization": "Bearer 1"}
        async with client(proxy(fleet, concurrent=1)) as http:
            first = asyncio.create_task(http.post(CHAT, json={}, headers=headers))
            await begun.wait()
            second = asyncio.create_task(http.post(CHAT, json={}, headers=headers))
            await asyncio.wait({second}, timeout=5)
            release.set()
            return (await first).status_code, (await second).status_code

    assert asyncio.run(run()) == (200, 429)


def test_invented_keys_leave_no_counts():
    def replica(call):
        return refuses(401, "invalid_api_key") if call.route.startswith("/v1/") else GOOD

    app = proxy(FakeFleet({"a": replica}), per_minute=9)
    paths = ("/docs", "/", CHAT)
    send_all(app, [(f"Bearer {n}", path) for n in range(5) for path in paths])
    assert not app._accepted and numbers(app) == ({}, {})


def test_the_counts_of_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(app_module, "_MAX_KEYS", 2)
    app = proxy(FakeFleet({"a": good}), per_minute=2)
    # the key that is unused for longest is forgotten
    statuses = send_all(app, [(key, CHAT) for key in ("1", "2", "1", "3", "1", "2", "2", "2")])
    assert statuses == [200, 200, 200, 200, 429, 200, 200, 429]
    assert [len(part) for part in numbers(app)] == [2, 2]


def numbers(app):
    counts = app.limits._counts
    return counts._numbers, counts._buckets


def test_another_machine_can_not_name_this_one():
    """Servers without keys answer to the name of their own machine."""
    fleet = FakeFleet({"a": good})
    app = proxy(fleet)

    def status(address, host):
        async def run():
            transport = httpx.ASGITransport(app, client=(address, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return (await http.post(CHAT, json={}, headers={"Host": host})).status_code

        return asyncio.run(run())

    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"):
        assert status("10.0.0.7", host) == 403
        assert status("127.0.0.1", host) == status("::1", host) == 200
    assert status("10.0.0.7", "proxy.example:8080") == 200
