"""Conversations of stored responses: their items, and the records that keep them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.server.errors import ApiError
from looseleaf.server.response_store import ResponseStore
from looseleaf.server.responses.ids import input_id, place_of
from looseleaf.server.translation import Json


@dataclass(frozen=True)
class Conversations:
    """The stored conversations of one tenant."""

    store: ResponseStore
    tenant: str

    async def keep(self, response: Json, items: Sequence[Json]) -> bool:
        """Keep a response and the items of its own input; whether they fit into the store."""
        name = response["id"]
        named = [
            {**item, "id": item.get("id") or input_id(name, number)}
            for number, item in enumerate(items)
        ]
        record = {"response": response, "input": named}
        content = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        return await self.store.put(self.tenant, name, content, response["previous_response_id"])

    async def response(self, name: str) -> Json:
        """A stored response. Raises ApiError (404)."""
        content = await self.store.get(self.tenant, name)
        if content is None:
            raise not_found(name)
        response: Json = json.loads(content)["response"]
        return response

    async def delete(self, name: str) -> None:
        """Drop a response. Raises ApiError (404)."""
        if not await self.store.delete(self.tenant, name):
            raise not_found(name)

    async def items_before(self, name: str | None) -> list[Json]:
        """All items up to the end of a response; none without one. Raises ApiError (404)."""
        if name is None:
            return []
        records = await self._records(name)
        return [item for record in records for item in _items(record)]

    async def input_items(self, name: str) -> list[Json]:
        """The items of a response's prompt. Raises ApiError (404)."""
        *records, last = await self._records(name)
        return [*(item for record in records for item in _items(record)), *last["input"]]

    async def resolved(self, items: Sequence[Json]) -> list[Json]:
        """``items`` with stored items in place of references. Raises ApiError (404)."""
        return [
            await self._referred(item["id"]) if item["type"] == "item_reference" else item
            for item in items
        ]

    async def _referred(self, name: str) -> Json:
        place = place_of(name)
        if place is not None:
            output = (await self.response(place[0]))["output"]
            if place[1] < len(output) and output[place[1]]["id"] == name:
                item: Json = output[place[1]]
                return item
        raise not_found(name)

    async def _records(self, name: str) -> list[Json]:
        contents = await self.store.chain(self.tenant, name)
        if contents is None:
            raise not_found(name)
        return [json.loads(content) for content in contents]


def not_found(name: str) -> ApiError:
    """A 404 for a response, or for an item of a response."""
    return ApiError(
        404,
        f"{name[:128]!r}, or a response before it, is not stored: it was dropped or deleted, or "
        "its request had store: false. Send the whole conversation as input",
        code="response_not_found",
    )


def _items(record: Json) -> list[Json]:
    return [*record["input"], *record["response"]["output"]]
