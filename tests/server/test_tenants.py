"""Tenants share nothing: neither documents, nor ids, nor hits, nor the time a hit saves."""

from typing import Any

import pytest

from looseleaf.server.names import REFERENCE_NAME
from tests.server.conftest import KEYS
from tests.server.live import DOCUMENT, Live, bearer, chat_body

RED, BLUE, OPERATOR = (bearer(KEYS[name]) for name in ("red", "blue", "operator"))
OPEN = ("/health", "/ready", "/docs", "/openapi.json", "/")


def long_text(name: str) -> str:
    return f"{DOCUMENT} " * 60 + f"This page belongs to {name}."


@pytest.mark.parametrize("path", OPEN)
def test_what_says_nothing_of_anybody_needs_no_key(tenants: Live, path: str) -> None:
    assert tenants.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong-key-000", "Basic red-key-0001"]
)
def test_without_a_key_there_is_no_access(tenants: Live, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    paths = tenants.client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        if path in OPEN:
            continue
        for method in methods:
            response = tenants.client.request(method, path, headers=headers, content=b"{}")
            assert response.status_code == 401, (method, path)
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.fixture
def red_document(tenants: Live) -> Any:
    """A document that red has registered."""
    body = {"id": "secret", "title": "Red", "text": long_text("red"), "pinned": True}
    made = tenants.post("/v1/documents", body, headers=RED)
    assert made.status_code == 201
    yield body
    tenants.client.delete("/v1/documents/secret", headers=RED)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/documents/secret"),
        ("DELETE", "/v1/documents/secret"),
        ("POST", "/v1/documents/secret/pin"),
        ("DELETE", "/v1/documents/secret/pin"),
    ],
)
def test_another_tenants_document_is_as_one_that_does_not_exist(
    tenants: Live, red_document: dict[str, Any], method: str, path: str
) -> None:
    theirs = tenants.client.request(method, path, headers=BLUE)
    nobodys = tenants.client.request(method, path.replace("secret", "nobody"), headers=BLUE)
    assert theirs.status_code == nobodys.status_code == 404
    told = theirs.json()["error"], nobodys.json()["error"]
    assert told[0]["message"].replace("secret", "nobody") == told[1]["message"]
    mine = tenants.client.get("/v1/documents/secret", headers=RED).json()
    assert mine["pinned"] is True
    assert mine["state"] == "ready"


def test_another_tenants_document_can_be_neither_listed_nor_used(
    tenants: Live, red_document: dict[str, Any]
) -> None:
    assert tenants.client.get("/v1/documents", headers=BLUE).json()["data"] == []
    assert tenants.chat(key=KEYS["blue"], documents=[{"id": "secret"}]).status_code == 404
    assert tenants.chat(key=KEYS["red"], documents=[{"id": "secret"}]).status_code == 200


def test_an_id_of_one_tenant_is_free_for_another(
    tenants: Live, red_document: dict[str, Any]
) -> None:
    other = {"id": "secret", "text": long_text("blue")}
    assert tenants.post("/v1/documents", other, headers=BLUE).status_code == 201
    titles = [
        tenants.client.get("/v1/documents/secret", headers=one).json()["title"]
        for one in (RED, BLUE)
    ]
    assert titles == ["Red", None]
    tenants.client.delete("/v1/documents/secret", headers=BLUE)
    assert tenants.client.get("/v1/documents/secret", headers=RED).status_code == 200


def test_the_same_text_is_no_hit_for_another_tenant(
    tenants: Live, red_document: dict[str, Any]
) -> None:
    documents = [{"text": red_document["text"]}]
    (red,) = tenants.chat(key=KEYS["red"], documents=documents).json()["looseleaf"]["documents"]
    blue = tenants.chat(key=KEYS["blue"], documents=documents).json()
    (told,) = blue["looseleaf"]["documents"]
    assert (red["source"], told["source"]) == ("cached", "computed")
    assert blue["looseleaf"]["document_tokens_reused"] == 0


def test_a_conversation_of_another_tenant_is_no_prefix(tenants: Live) -> None:
    messages = [{"role": "user", "content": long_text("nobody")}]

    def cached(tenant: str) -> int:
        answer = tenants.chat(key=KEYS[tenant], messages=messages).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("red") == 0
    assert cached("blue") == 0
    assert cached("blue") > 100


def test_the_time_of_an_answer_does_not_tell_what_another_tenant_holds(tenants: Live) -> None:
    """A document that red holds takes blue as long as one that nobody holds, and not as long as
    one that blue holds."""
    times: dict[str, list[float]] = {"held by red": [], "held by nobody": [], "held by blue": []}
    for number in range(9):
        held, own = (long_text(f"{who} {number}") for who in ("red", "blue"))
        tenants.chat(key=KEYS["red"], documents=[{"text": held}], max_tokens=1)
        tenants.chat(key=KEYS["blue"], documents=[{"text": own}], max_tokens=1)
        texts = {
            "held by red": held,
            "held by nobody": long_text(f"- {number}"),
            "held by blue": own,
        }
        for who, text in texts.items():
            body = chat_body(documents=[{"text": text}], max_tokens=1)
            answer = tenants.post("/v1/chat/completions", body, headers=BLUE).json()
            times[who].append(answer["looseleaf"]["times"]["first_token"])
    # the quickest of each: what else the machine does makes single ones slower
    red, nobody, blue = (min(times[who]) for who in texts)
    assert blue < 0.5 * nobody, "a hit must be visible in this measurement"
    assert red > 0.7 * nobody, times


def test_metrics_are_for_the_operator(tenants: Live) -> None:
    assert tenants.client.get("/metrics", headers=RED).status_code == 403
    assert tenants.client.get("/metrics").status_code == 401
    assert b"looseleaf_pages" in tenants.client.get("/metrics", headers=OPERATOR).content


def test_models_are_listed_to_those_with_a_key(tenants: Live) -> None:
    found = tenants.client.get("/v1/models", headers=RED).json()["data"]
    assert [model["id"] for model in found] == [REFERENCE_NAME]
