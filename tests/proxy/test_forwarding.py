"""A lost or busy replica costs a retry until the first byte, and a clear error after it."""

import asyncio
import json

import pytest

from looseleaf.proxy.fleet import Call
from tests.proxy.fakes import LOST, SILENT, FakeFleet, answers, client, proxy, refuses, streams

CHAT = "/v1/chat/completions"
GOOD = answers(200, {"id": "good"})


def post(fleet, path=CHAT, body=None, **options):
    async def run():
        async with client(proxy(fleet, **options)) as http:
            return await http.post(path, json=body or {"prompt": "a"})

    return asyncio.run(run())


def good(call):
    return GOOD


@pytest.mark.parametrize(
    "bad",
    [
        None,
        streams(LOST),
        (200, "application/json", [b"half", LOST]),
        refuses(503, "restarting"),
        refuses(429, "queue_full"),
    ],
    ids=["unreachable", "no first byte", "half an answer", "restarting", "busy"],
)
def test_a_request_without_an_answer_goes_to_another_replica(bad):
    fleet = FakeFleet({"a": lambda call: bad, "b": good})
    response = post(fleet)
    assert response.status_code == 200 and response.json() == {"id": "good"}
    assert [replica for replica, _ in fleet.calls] == ["a", "b"]
    # every call that began has ended
    assert len(fleet.closed) == (1 if bad is None else 2)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 500])
def test_other_errors_are_the_answer(status):
    fleet = FakeFleet({"a": lambda call: refuses(status, "some_code"), "b": good})
    response = post(fleet)
    assert response.status_code == status and len(fleet.calls) == 1


def test_a_rate_limit_of_a_key_is_the_answer():
    fleet = FakeFleet({"a": lambda call: refuses(429, "rate_limit_exceeded"), "b": good})
    assert post(fleet).status_code == 429


def test_the_last_refusal_is_the_answer_if_all_refuse():
    fleet = FakeFleet({"a": lambda call: None, "b": lambda call: refuses(429, "queue_full")})
    response = post(fleet)
    assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"


def test_no_replica_is_an_error_that_says_to_retry():
    response = post(FakeFleet({"a": lambda call: None}))
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert "again" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "event"),
    [(CHAT, b""), ("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")],
)
def test_a_stream_that_has_begun_ends_with_an_error(path, event):
    fleet = FakeFleet({"a": lambda call: streams(b"data: 1\n\n", LOST), "b": good})
    response = post(fleet, path)
    first, _, rest = response.content.partition(b"data: 1\n\n")
    assert response.status_code == 200 and first == b"" and len(fleet.calls) == 1
    assert rest.lstrip().startswith(event + b"data: ") and b"[DONE]" not in rest
    error = json.loads(rest.partition(b"data: ")[2])
    assert "again" in json.dumps(error)
    assert fleet.closed == ["a"]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_the_error_of_a_stream_that_ends_within_a_line_is_an_event_of_its_own(path):
    content = post(FakeFleet({"a": lambda call: streams(b'data: {"ha', LOST)}), path).content
    half, event = content.split(b"\n\n")[:2]
    assert half == b'data: {"ha' and b"send the request again" in event


@pytest.mark.parametrize(
    "script",
    [streams(SILENT), (200, "application/json", [b"half", SILENT])],
    ids=["no first byte", "half an answer"],
)
def test_a_silent_replica_costs_no_retry(script):
    fleet = FakeFleet({"a": lambda call: script, "b": good})
    response = post(fleet)
    assert response.status_code == 504 and [replica for replica, _ in fleet.calls] == ["a"]
    error = response.json()["error"]
    assert error["code"] == "replica_silent" and "stream the answer" in error["message"]
    assert response.headers["x-should-retry"] == "false" and fleet.closed == ["a"]


def test_a_stream_passes_unchanged():
    chunks = [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    response = post(FakeFleet({"a": lambda call: streams(*chunks)}))
    assert response.content == b"".join(chunks)
    assert response.headers["content-type"].startswith("text/event-stream")


def test_a_call_keeps_its_path_headers_and_body():
    fleet = FakeFleet({"a": good})

    async def run():
        async with client(proxy(fleet)) as http:
            await http.post("/v1/x%2Fy?a=b%20c", content=b"{not json", headers={"X-Any": "1"})

    asyncio.run(run())
    ((_, call),) = fleet.calls
    assert call.path == "/v1/x%2Fy?a=b%20c" and call.body == b"{not json"
    assert dict(call.headers)["x-any"] == "1"


def test_a_large_body_is_refused():
    response = post(FakeFleet({"a": good}), body={"prompt": "a" * 100}, max_body=50)
    assert response.status_code == 413


def test_a_rate_limit_holds_over_all_replicas():
    fleet = FakeFleet({"a": good, "b": good})

    async def run():
        async with client(proxy(fleet, per_minute=2)) as http:
            return [
                (await http.post(CHAT, json={}, headers={"Authorization": key})).status_code
                for key in ("Bearer 1", "Bearer 1", "Bearer 1", "Bearer 1", "Bearer 2")
            ]

    assert asyncio.run(run()) == [200, 200, 429, 429, 200]


def test_keys_that_replicas_refuse_are_not_kept():
    app = proxy(FakeFleet({"a": lambda call: refuses(401, "invalid_api_key")}))

    async def run():
        async with client(app) as http:
            for number in range(5):
                await http.post(CHAT, json={}, headers={"Authorization": f"Bearer {number}"})

    asyncio.run(run())
    assert not app._accepted


def test_a_client_that_disconnects_ends_its_call():
    fleet = FakeFleet({"a": good})
    waiting = asyncio.Event()

    async def run():
        app, ended = proxy(fleet), []

        async def hang(replica, call, affinity):
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(replica)

        fleet.send = hang
        messages = [{"type": "http.request", "body": b"{}"}]

        async def receive():
            if messages:
                return messages.pop()
            await waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        await asyncio.wait_for(app(scope, receive, send), 5)
        return ended

    assert asyncio.run(run()) == ["a"]


def test_the_proxy_reports_its_own_health():
    async def run(fleet):
        async with client(proxy(fleet)) as http:
            answers = [await http.get(path) for path in ("/health", "/ready", "/metrics")]
            return [answer.status_code for answer in answers], answers[2].text

    statuses, metrics = asyncio.run(run(FakeFleet({})))
    assert statuses == [200, 503, 200] and "looseleaf_route_requests_in_flight" in metrics
    assert asyncio.run(run(FakeFleet({"a": good})))[0] == [200, 200, 200]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/resp_1/cancel"])
def test_a_stored_response_is_looked_for_at_all_replicas(path):
    missing = refuses(404, "response_not_found")
    fleet = FakeFleet({"a": lambda call: missing, "b": lambda call: missing, "c": good})
    assert post(fleet, path).json() == {"id": "good"}
    fleet = FakeFleet({"a": lambda call: missing, "b": lambda call: missing})
    assert post(fleet, path).status_code == 404 and len(fleet.calls) == 2


def test_a_stored_response_is_looked_for_where_a_router_chooses_replicas():
    missing = refuses(404, "response_not_found")
    fleet = FakeFleet({"": lambda call: missing, "a": lambda call: missing, "b": good})
    fleet.order = lambda affinity: ["", ""]  # type: ignore[method-assign]
    assert post(fleet, "/v1/responses").json() == {"id": "good"}


def test_the_affinity_of_a_stored_response_is_in_its_path():
    orders = []
    fleet = FakeFleet({"a": good})
    fleet.order = lambda affinity: orders.append(affinity) or ["a"]  # type: ignore[method-assign]
    name = "resp_" + "ab" * 24
    post(fleet, f"/v1/responses/{name}/cancel")
    post(fleet, "/v1/responses", {"input": "a", "previous_response_id": name})
    assert {order.conversation for order in orders} == {"ab" * 8}


def test_errors_of_the_proxy_have_the_form_of_the_api():
    response = post(FakeFleet({"a": lambda call: None}), "/v1/messages")
    assert response.status_code == 503
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "overloaded_error"


def test_a_key_of_anthropics_clients_registers_documents():
    call = Call("POST", "/v1/messages", [("X-Api-Key", "k"), ("Accept", "x")])
    kept = dict(call.to("POST", "/v1/documents", b"{}").headers)
    assert kept == {"X-Api-Key": "k", "content-type": "application/json"}
