"""``/v1/documents`` over all replicas.

A registration goes to one replica, and to others when a request needs it there. Reads merge the
answers of all replicas. Pins and deletions go to all of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode

from looseleaf.proxy.fleet import Call
from looseleaf.proxy.forwarder import Answer, Forwarder
from looseleaf.router import Affinity, affinity_of
from looseleaf.router.affinity import CHARACTERS_PER_TOKEN
from looseleaf.router.tags import registered_tag, text_tag
from looseleaf.server.errors import ApiError, unavailable

PATH = "/v1/documents"
_MAX_LIST = 1000


async def answer_documents(call: Call, body: Any, forwarder: Forwarder) -> Answer:
    """The answer to a call below ``/v1/documents``. Raises ApiError."""
    name = unquote(call.route[len(PATH) + 1 :])
    if call.route == PATH and call.method == "POST":
        return await _register(call, body, forwarder)
    if call.route == PATH and call.method == "GET":
        return await _list(call, forwarder)
    document_id = name.removesuffix("/pin")
    if call.method == "GET":
        return await _get(call, document_id, forwarder)
    answer = _best(await forwarder.broadcast(call))
    if call.method == "DELETE" and document_id == name and answer.status in (200, 404):
        forwarder.registered.drop(call.key, document_id)
    return answer


async def _register(call: Call, body: Any, forwarder: Forwarder) -> Answer:
    if not isinstance(body, Mapping):
        return await forwarder.forward(call, Affinity())
    answer = await forwarder.forward(call, _registration(body))
    document_id = _registered_id(answer)
    if answer.status < 300 and document_id is not None:
        again = {**body, "id": document_id, "wait": True, "stream": False}
        content = json.dumps(again, ensure_ascii=True).encode()
        forwarder.registered.keep(call.key, document_id, content)
    return answer


def _registration(body: Mapping[str, Any]) -> Affinity:
    """The affinity of a registration: that of later requests, as far as their tag is known."""
    document_id, text = body.get("id"), body.get("text")
    texts = [text] if isinstance(text, str) else text if isinstance(text, list) else []
    if not all(isinstance(item, str) for item in texts):
        return Affinity()
    weight = 1 + sum(map(len, texts)) // CHARACTERS_PER_TOKEN
    if isinstance(document_id, str):
        return Affinity(((registered_tag(document_id), weight),))
    title = body.get("title")
    return Affinity(((text_tag(title if isinstance(title, str) else None, texts), weight),))


def _registered_id(answer: Answer) -> str | None:
    """The id in the answer to a registration, or in the first event of its stream."""
    content = answer.first
    if answer.rest is not None:
        content = content.partition(b"\n")[0].removeprefix(b"data:")
    try:
        document_id = json.loads(content)["id"]
    except (ValueError, TypeError, KeyError):
        return None
    return document_id if isinstance(document_id, str) else None


async def _get(call: Call, document_id: str, forwarder: Forwarder) -> Answer:
    affinity = affinity_of({"documents": [{"id": document_id}]})
    # a replica without the document is not asked to compute it
    answers = await forwarder.broadcast(call)
    order = forwarder.fleet.order(affinity)
    answers.sort(key=lambda a: order.index(a.replica) if a.replica in order else len(order))
    return _best(answers)


def _best(answers: Sequence[Answer]) -> Answer:
    """The answer of a replica with the document, else of one without."""
    if not answers:
        raise unavailable("no replica answers: ask again in a moment", "no_replica")
    return min(answers, key=lambda answer: answer.status)


async def _list(call: Call, forwarder: Forwarder) -> Answer:
    """The union of all replicas' lists, oldest first."""
    query = parse_qs(call.path.partition("?")[2])
    after, limit = query.get("after", [None])[-1], query.get("limit", [str(_MAX_LIST)])[-1]
    if not limit.isdecimal() or not 1 <= int(limit) <= _MAX_LIST:
        # the replica words the error
        return _best(await forwarder.broadcast(call))
    documents: dict[str, Any] = {}
    for replica in forwarder.fleet.everyone():
        refusal = await _list_one(call, forwarder, replica, documents)
        if refusal is not None:
            return refusal
    data = sorted(documents.values(), key=lambda entry: (entry["created"], entry["id"]))
    if after is not None:
        places = [place for place, entry in enumerate(data) if entry["id"] == after]
        if not places:
            raise ApiError(404, f"no document {after[:128]!r}", code="document_not_found")
        data = data[places[0] + 1 :]
    page = data[: int(limit)]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    content = {"object": "list", "data": page, **ends, "has_more": len(data) > len(page)}
    headers = [("content-type", "application/json")]
    return Answer("", 200, headers, json.dumps(content, ensure_ascii=False).encode())


async def _list_one(
    call: Call, forwarder: Forwarder, replica: str, documents: dict[str, Any]
) -> Answer | None:
    """Add the documents of one replica; its answer if it refuses."""
    after: dict[str, str] = {}
    while True:
        page = call.to("GET", f"{PATH}?{urlencode({'limit': _MAX_LIST, **after}, quote_via=quote)}")
        answer = await forwarder.ask(replica, page)
        if answer is None or answer.status == 503:
            return None
        if answer.status != 200:
            return answer
        content = json.loads(answer.first)
        for entry in content["data"]:
            known = documents.get(entry["id"])
            if known is None or (known["state"] != "ready" and entry["state"] == "ready"):
                documents[entry["id"]] = entry
        if not content["has_more"]:
            return None
        after = {"after": content["last_id"]}
