"""The summary of held documents: tags that a router computes alone, and an end with eviction."""

from looseleaf.router import affinity_of, registered_tag
from tests.server.live import DOCUMENT, QUESTION, bearer, chat_body, live_server

OTHER = "The archive is in the north wing. " * 8


def documents_of(server, **options):
    response = server.client.get("/v1/holdings", **options)
    assert response.status_code == 200, response.text
    return response.json()


def tags_of(body):
    return [tag for tag, _ in affinity_of(body).documents]


def test_a_server_reports_the_tags_that_a_router_computes():
    with live_server(engine={"num_pages": 64}) as live:
        body = chat_body(documents=[{"title": "Travel", "text": DOCUMENT}])
        assert live.post("/v1/chat/completions", body).status_code == 200
        holdings = documents_of(live)
        assert set(holdings["documents"]) == set(tags_of(body))
        assert all(tokens > 0 for tokens in holdings["documents"].values())
        registered = {"id": "archive", "text": OTHER}
        assert live.post("/v1/documents", registered).status_code == 201
        later = documents_of(live)
        assert registered_tag("archive") in later["documents"]
        assert later["version"] != holdings["version"]

        # nothing is sent twice
        unchanged = documents_of(live, params={"after": later["version"], "wait": 0.1})
        assert unchanged["documents"] is None and unchanged["version"] == later["version"]

        # evicted documents are not held
        live.call(lambda engine: engine.store.evict_idle())
        assert not set(tags_of(body)) & set(documents_of(live)["documents"])


def test_holdings_are_for_the_operator(tenants):
    assert tenants.client.get("/v1/holdings").status_code == 401
    refused = tenants.client.get("/v1/holdings", headers=bearer("red-key-0001"))
    assert refused.status_code == 403 and "/v1/holdings" in refused.json()["error"]["message"]
    documents_of(tenants, headers=bearer("operator-key-0001"))


def test_documents_inside_messages_have_the_same_tags(live):
    part = {"type": "document", "text": "Room nine has a blue door."}
    content = [part, {"type": "text", "text": QUESTION}]
    body = chat_body(messages=[{"role": "user", "content": content}])
    assert live.post("/v1/chat/completions", body).status_code == 200
    assert set(tags_of(body)) <= set(documents_of(live)["documents"])
