"""The client of real servers sends again what was lost or refused; its times become costs."""

import asyncio
import json

import pytest
from aiohttp import web

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench.fleet.calibrate import Totals, idle_costs, loaded_costs
from looseleaf_lab.bench.fleet.real import Texts, Timed, behind, figures, replay
from looseleaf_lab.bench.fleet.requests import FleetRequest

REQUEST = FleetRequest(0.0, ((7, 10),), 4, 2)
REPORT = {
    "document_tokens_computed": 10,
    "document_tokens_reused": 0,
    "text_tokens": 4,
    "text_tokens_cached": 0,
    "times": {"queued": 0.001, "first_token": 0.002, "total": 0.003},
}


def event(content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def answer_of(*parts):
    deltas = [event({"choices": [{"delta": {"content": part}}]}) for part in parts]
    return b"".join([*deltas, event({"choices": [], "looseleaf": REPORT}), b"data: [DONE]\n\n"])


def times_at(server, **options):
    """The times of one request at ``server``, a function of the number of its attempt."""
    attempts = []

    async def handle(request):
        attempts.append(await request.json())
        status, content = server(len(attempts))
        return web.Response(status=status, body=content, content_type="text/event-stream")

    async def run():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            urls = behind(f"http://127.0.0.1:{port}")
            return await replay([(3, REQUEST)], urls, Texts("m", 1.0), **options)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), attempts


def test_lost_and_refused_attempts_are_sent_again_and_counted():
    lost = answer_of("x").partition(b"data: [DONE]")[0][:30] + b"\n\n"
    cut = event({"choices": [{"delta": {"content": "x"}}]}) + event({"error": {"code": "lost"}})
    replies = [(429, b"{}"), (200, cut), (200, lost), (200, answer_of("ab", "c"))]
    seen = []
    interrupts = {1: lambda: seen.append("called")}
    times, attempts = times_at(lambda n: replies[n - 1], clients=2, interrupts=interrupts)
    (entry,) = times
    assert (entry.lost, entry.refused, entry.answer) == (2, 1, "abc")
    assert attempts == attempts[:1] * 4 and seen == ["called"]
    row = figures("documents", 3, times, [1])
    assert (row["hits"], row["lost"], row["refused"]) == (0.0, 2, 1)


def test_an_error_that_no_attempt_mends_ends_the_run():
    with pytest.raises(LooseleafError, match="status 400: a bad field"):
        times_at(lambda _: (400, b"a bad field"))


def timed(computed, prompt, queued=0.5):
    """A request of a server with a step of 2 ms and 0.1 ms per token, 7 ms outside of it."""
    first = queued + 0.002 + 1e-4 * (prompt + computed)
    return Timed(
        first + 0.007, first + 0.014, 100, computed, prompt, queued, first, first + 0.002, "a"
    )


def test_costs_have_the_ratios_of_an_idle_server_and_the_size_of_loaded_steps():
    times = [timed(0, 20), timed(0, 20, 0.1), timed(100, 20), timed(100, 20)]
    idle = idle_costs(times, output_tokens=2)
    assert idle.step_seconds(20, 1, 1, 1) == pytest.approx(0.002 + 20e-4)
    assert idle.step_seconds(120, 1, 1, 1) == pytest.approx(0.002 + 120e-4)
    assert idle.step_seconds(0, 0, 1, 1) == pytest.approx(0.002)
    # eight steps of 2 ms and of 280 prompt tokens, twice as long under load
    seconds = 2 * (8 * 0.002 + 280 * 1e-4)
    costs = loaded_costs(idle, times, 4, Totals(1, 1.0, 1, 1), Totals(9, 1 + seconds, 281, 9))
    assert costs.step_seconds(20, 1, 1, 1) == pytest.approx(2 * (0.002 + 20e-4), rel=0.01)
    assert (costs.overhead, costs.first_delay) == (pytest.approx(0.012), pytest.approx(-0.005))
    with pytest.raises(LooseleafError, match="cached and computed"):
        idle_costs(times[:2], output_tokens=2)
