"""The probes of a fleet over HTTP: a busy replica is kept, and a lost one is read anew."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from looseleaf.config import ServerConfig
from looseleaf.config.route import RouteConfig
from looseleaf.proxy import http_fleet
from looseleaf.proxy.fleet import Call, ReplicaLost, ReplicaSilent
from looseleaf.proxy.http_fleet import HttpFleet
from looseleaf.proxy.metrics import ProxyMetrics
from looseleaf.router import Affinity
from tests.proxy.fakes import Silent, client, proxy

CHAT = "/v1/chat/completions"
WANTED = Affinity((("tag", 7),))


class Replica:
    """A server whose answers to polls are a script: bodies, and `None` for no answer.

    A poll after the script's end sets ``over`` and has no answer."""

    def __init__(self, *polls):
        self.polls, self.queries, self.requests = list(polls), [], 0
        self.over, self.asleep, self.asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ready, self.awaken = True, asyncio.Event()

    async def holdings(self, request):
        self.queries.append(dict(request.query))
        if not self.polls:
            self.over.set()
            await asyncio.Event().wait()
        answer = self.polls.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if len(self.queries) == 2:
            self.asleep.set()
            await self.awaken.wait()
        return web.json_response(answer)

    async def probe(self, request):
        self.asked.set()
        return web.Response() if self.ready else await asyncio.Event().wait()

    async def chat(self, request):
        self.requests += 1
        await request.read()
        response = web.StreamResponse(headers={"content-type": "application/json"})
        if request.query.get("head"):
            await response.prepare(request)
        await asyncio.Event().wait()
        return response


@asynccontextmanager
async def serving(replica, **options):
    """A fleet of one replica, its URL, and the listener of the replica."""
    application = web.Application()
    application.router.add_get("/v1/holdings", replica.holdings)
    application.router.add_get("/ready", replica.probe)
    application.router.add_post(CHAT, replica.chat)
    runner = web.AppRunner(application, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    fleet = HttpFleet([url], RouteConfig(**options), ProxyMetrics(), Silent())
    await fleet.open()
    try:
        yield fleet, url, site
    finally:
        await fleet.close()
        await runner.cleanup()


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(http_fleet, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(http_fleet, "_LATE_SECONDS", 0.2)
    monkeypatch.setattr(http_fleet, "_PAUSE_SECONDS", 0.0)


def held(version, documents):
    return {"version": version, "documents": documents}


def test_a_busy_replica_is_kept_with_its_holdings(fast):
    async def run():
        replica = Replica(held("1", {"tag": 7}), None)
        async with serving(replica) as (fleet, url, _):
            await asyncio.wait_for(replica.over.wait(), 10)
            assert fleet.everyone() == [url] and replica.asked.is_set()
            assert fleet.router.held_tokens(url, WANTED) == 7
            return replica.queries

    # the poll after the late one continues with the known version
    assert [query.get("after") for query in asyncio.run(run())] == [None, "1", "1"]


def test_a_replica_that_answers_no_probe_is_lost(fast):
    async def run():
        replica = Replica(held("1", {"tag": 7}), None)
        replica.ready = False
        async with serving(replica) as (fleet, url, _):
            await asyncio.wait_for(replica.over.wait(), 10)
            assert fleet.everyone() == [] and fleet.router.held_tokens(url, WANTED) == 0
            return replica.queries

    assert [query.get("after") for query in asyncio.run(run())] == [None, "1", None]


def test_a_failed_connection_costs_neither_holdings_nor_loads(monkeypatch):
    monkeypatch.setattr(http_fleet, "_PAUSE_SECONDS", 0.0)

    async def run():
        whole = held("1", {"tag": 7})
        replica = Replica(whole, held("1", None), whole)
        async with serving(replica) as (fleet, url, site):
            await asyncio.wait_for(replica.asleep.wait(), 10)
            running = await fleet.send(url, Call("POST", f"{CHAT}?head=1"), WANTED)
            await site.stop()
            with pytest.raises(ReplicaLost):
                await fleet.send(url, Call("POST", CHAT), WANTED)
            assert fleet.everyone() == [] and fleet.router.loads.running(url) == 1
            replica.awaken.set()
            # the connection of the polls is still open
            await asyncio.wait_for(replica.over.wait(), 10)
            assert fleet.everyone() == [url]
            assert fleet.router.held_tokens(url, WANTED) == 7
            await running.close()
            assert fleet.router.loads.running(url) == 0
            return replica.queries

    # unchanged documents are read anew, because the proxy has dropped them
    assert [query.get("after") for query in asyncio.run(run())] == [None, "1", None, "1"]


def test_a_silent_replica_gets_the_request_once():
    async def run():
        replica = Replica(held("1", {}))
        async with serving(replica, silence_seconds=0.2) as (fleet, url, _):
            await asyncio.wait_for(replica.over.wait(), 10)
            fleet.order = lambda affinity: [url, url]
            async with client(proxy(fleet)) as http:
                answers = [await http.post(path, json={}) for path in (CHAT, f"{CHAT}?head=1")]
            reply = await fleet.send(url, Call("POST", f"{CHAT}?head=1"), WANTED)
            with pytest.raises(ReplicaSilent):
                await anext(reply.chunks())
            await reply.close()
            return answers, replica.requests

    answers, requests = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [504, 504] and requests == 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"replica_silent"}
    assert "0.2 s" in answers[0].json()["error"]["message"]


def test_a_replica_may_be_silent_for_longer_than_its_deadline():
    assert RouteConfig().silence_seconds > ServerConfig().deadline
