"""Registered documents: computed ahead, used by id, pinned, deleted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from looseleaf.server.protocol.documents import DocumentBody
from tests.server.live import DOCUMENT, Live, live_server

TEXT = f"{DOCUMENT} " * 20


def test_a_registered_document_is_there_when_it_is_asked_about(live: Live) -> None:
    made = live.post("/v1/documents", {"id": "book", "title": "Book", "text": TEXT + "One."})
    assert made.status_code == 201
    document = DocumentBody.model_validate(made.json())
    assert document.state == "ready"
    assert document.tokens_done == document.tokens > 100
    answer = live.chat(documents=[{"id": "book"}]).json()["looseleaf"]
    (told,) = answer["documents"]
    assert (told["id"], told["title"], told["source"]) == ("book", "Book", "cached")
    assert answer["document_tokens_computed"] == 0
    now = DocumentBody.model_validate(live.client.get("/v1/documents/book").json())
    assert now.hits == 1
    assert now.computed == 1
    assert "book" in [d["id"] for d in live.client.get("/v1/documents").json()["data"]]
    assert live.client.delete("/v1/documents/book").json()["deleted"] is True
    assert live.client.get("/v1/documents/book").status_code == 404
    assert live.chat(documents=[{"id": "book"}]).status_code == 404


def test_a_list_comes_in_pages_that_are_together_all_of_it(live: Live) -> None:
    for n in range(5):
        assert live.post("/v1/documents", {"id": f"page-{n}", "text": f"{n}."}).status_code == 201
    whole = live.client.get("/v1/documents").json()
    ids = [document["id"] for document in whole["data"]]
    assert whole["has_more"] is False
    assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
    seen, after, more = list[str](), "", True
    while more:
        behind = {"after": after} if after else {}
        page = live.client.get("/v1/documents", params={"limit": 2, **behind}).json()
        assert 0 < len(page["data"]) <= 2
        seen += [document["id"] for document in page["data"]]
        after, more = page["last_id"], page["has_more"]
    assert seen == ids
    nothing = live.client.get("/v1/documents", params={"after": ids[-1]}).json()
    assert nothing["data"] == [] and nothing["last_id"] is None and nothing["has_more"] is False
    unknown = live.client.get("/v1/documents", params={"after": "nowhere"})
    assert unknown.status_code == 404 and "nowhere" in unknown.json()["error"]["message"]
    for limit in (0, 1001, "many"):
        refused = live.client.get("/v1/documents", params={"limit": limit})
        assert refused.status_code == 400 and "limit" in refused.json()["error"]["message"]
    for n in range(5):
        live.client.delete(f"/v1/documents/page-{n}")


def test_a_stream_of_progress_grows_until_the_document_is_ready(live: Live) -> None:
    events = live.events("/v1/documents", {"text": TEXT + "Two.", "stream": True})
    done = [event["tokens_done"] for event in events]
    assert done == sorted(done)
    assert events[-1]["state"] == "ready"
    assert done[-1] == events[-1]["tokens"]
    live.client.delete(f"/v1/documents/{events[0]['id']}")


def test_the_same_text_is_the_same_document_and_another_one_is_a_conflict(live: Live) -> None:
    body = {"id": "twice", "text": TEXT + "Three."}
    first, again = (live.post("/v1/documents", body).json() for _ in range(2))
    assert again["created"] == first["created"]
    assert again["computed"] == 1
    other = live.post("/v1/documents", {**body, "text": "Another text."})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "document_exists"
    live.client.delete("/v1/documents/twice")


def test_a_document_without_waiting_is_accepted_at_once(live: Live) -> None:
    made = live.post("/v1/documents", {"id": "later", "text": TEXT + "Four.", "wait": False})
    assert made.status_code in (201, 202)
    again = live.post("/v1/documents", {"id": "later", "text": TEXT + "Four."})
    assert again.json()["state"] == "ready"
    live.client.delete("/v1/documents/later")


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_pinning_needs_no_body_and_no_content_type(live: Live, content: bytes | None) -> None:
    live.post("/v1/documents", {"id": "bare", "text": TEXT + "Bare."})
    request = live.client.build_request("POST", "/v1/documents/bare/pin", content=content)
    # as curl sends it: without a body there is no length, and never a type of its own
    for header in ("content-type", *(["content-length"] if not content else [])):
        request.headers.pop(header, None)
    answer = live.client.send(request)
    assert (answer.status_code, answer.json().get("pinned")) == (200, True)
    assert live.client.delete("/v1/documents/bare/pin").status_code == 200
    live.client.delete("/v1/documents/bare")


def test_pinned_pages_are_counted_as_pinned_until_they_are_not(live: Live) -> None:
    live.wait_until_idle()
    before = live.now().pages.pinned
    made = live.post("/v1/documents", {"id": "kept", "text": TEXT + "Five.", "pinned": True}).json()
    live.wait_until_idle()
    assert made["pinned"] is True
    assert live.now().pages.pinned == before + made["pages"]
    assert live.client.delete("/v1/documents/kept/pin").json()["pinned"] is False
    assert live.client.post("/v1/documents/kept/pin").json()["pinned"] is True
    live.client.delete("/v1/documents/kept")
    live.wait_until_idle()
    assert live.now().pages.pinned == before


def test_a_registered_collection_reads_as_its_texts_in_a_prompt(live: Live) -> None:
    texts = [TEXT, TEXT + "Two.", TEXT + "Three."]
    body = {"id": "several", "title": "All", "text": texts, "hosted": True, "index": "ivf"}
    made = DocumentBody.model_validate(live.post("/v1/documents", body).json())
    single = DocumentBody.model_validate(live.post("/v1/documents", {"text": TEXT}).json())
    assert (made.state, made.title) == ("ready", "All") and made.tokens > 3 * single.tokens
    read = {"documents": [{"id": "several"}], "temperature": 0, "max_tokens": 8}
    assert live.chat(**read, select={"policy": "retrieval", "ratio": 1.0}).status_code == 200
    for wrong in ([], ["text", " "]):
        refused = live.post("/v1/documents", {**body, "text": wrong})
        assert refused.status_code == 400 and "empty" in refused.text
    for name in ("several", single.id):
        live.client.delete(f"/v1/documents/{name}")


def test_a_hosted_document_takes_no_page(live: Live) -> None:
    live.wait_until_idle()
    before = live.now().pages
    body = {"id": "long", "text": TEXT + "Six.", "hosted": True, "index": "ivf"}
    made = live.post("/v1/documents", body)
    document = DocumentBody.model_validate(made.json())
    assert (document.state, document.hosted, document.pages) == ("ready", True, 0)
    assert document.bytes > 0 and document.tokens_done == document.tokens
    live.wait_until_idle()
    assert live.now().pages == before
    read = {"documents": [{"id": "long"}], "temperature": 0, "max_tokens": 8}
    whole = live.chat(**read, select={"policy": "retrieval", "ratio": 1.0}).json()
    few = live.chat(**read, select={"policy": "retrieval", "tokens": 40}).json()["looseleaf"]
    all_read, some = whole["looseleaf"]["selection"], few["selection"]
    assert all_read["keys_read"] == all_read["keys_there"] == some["keys_there"] > 0
    assert 0 < some["keys_read"] < some["keys_there"]
    told = live.chat(**read, select="retrieval").json()["looseleaf"]["documents"]
    assert [(one["id"], one["source"], one["hosted"]) for one in told] == [("long", "cached", True)]
    listed = DocumentBody.model_validate(live.client.get("/v1/documents/long").json())
    assert (listed.computed, listed.hits) == (1, 3) and listed.seconds
    assert "looseleaf_hosted_keys_read_total" in live.client.get("/metrics").text
    assert live.chat(**read).json()["choices"] == whole["choices"]
    assert live.client.delete("/v1/documents/long").json()["deleted"] is True
    for wrong in ({"pinned": True}, {"hosted": False}):
        refused = live.post("/v1/documents", {**body, **wrong})
        assert refused.status_code in (400, 422)


def test_no_more_documents_are_registered_than_are_allowed_however_many_come_at_once() -> None:
    def register(name: int) -> int:
        body = {"id": f"n{name}", "text": f"{TEXT} {name}.", "wait": False}
        return live.post("/v1/documents", body).status_code

    with live_server(config={"max_registered": 3}) as live:
        with ThreadPoolExecutor(12) as threads:
            statuses = list(threads.map(register, range(12)))
        assert sorted(status // 100 for status in statuses) == [2] * 3 + [4] * 9
        kept = live.client.get("/v1/documents").json()["data"]
        assert len(kept) == 3
        refused = live.post("/v1/documents", {"text": "One more."})
        assert refused.json()["error"]["code"] == "too_many_documents"
        # what is registered already is found again
        same = int(kept[0]["id"].removeprefix("n"))
        assert register(same) in (200, 201, 202)


@pytest.mark.parametrize("context", ["alone", "prompt"])
def test_a_context_that_only_a_request_can_give_is_refused_with_what_to_do(
    live: Live, context: str
) -> None:
    before = live.now().registered_documents
    refused = live.post("/v1/documents", {"text": DOCUMENT, "context": context})
    assert refused.status_code == 400
    assert "send its text with each request" in refused.json()["error"]["message"]
    assert live.now().registered_documents == before
    refused = live.chat(documents=[{"id": "handbook", "context": context}])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "documents.0.context"
    assert "send its text" in error["message"]


def test_a_document_is_registered_behind_the_lead_which_may_be_said(live: Live) -> None:
    made = live.post("/v1/documents", {"id": "said", "text": DOCUMENT, "context": "lead"})
    assert made.status_code == 201, made.text
    live.client.delete("/v1/documents/said")
