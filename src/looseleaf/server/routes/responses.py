"""``/v1/responses``: OpenAI's responses over the same chats, with stored conversations."""

import json
import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from looseleaf.router import affinity_of, response_tag
from looseleaf.server.blocks import BlockAnswer, Blocks
from looseleaf.server.body import StrictRoute
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import Caller
from looseleaf.server.protocol.answers import ERRORS
from looseleaf.server.protocol.response_answers import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseBody,
)
from looseleaf.server.protocol.responses import ResponsesRequest
from looseleaf.server.responses.conversation import Conversations
from looseleaf.server.responses.form import ResponseForm
from looseleaf.server.responses.ids import new_response_id
from looseleaf.server.responses.translate import items_of, translate
from looseleaf.server.routes.chat import begin_chat, chat_prompt
from looseleaf.server.routes.common import due_of, log_user, page_of, respond
from looseleaf.server.routes.context import KEYED, TheCaller, TheService
from looseleaf.server.service import Service
from looseleaf.server.translation import Json

router = APIRouter(
    prefix="/v1/responses",
    route_class=StrictRoute,
    responses=ERRORS,
    dependencies=KEYED,
    tags=["responses"],
)

Id = Annotated[str, Path(max_length=256, description="The id of a stored response.")]
After = Annotated[str | None, Query(max_length=256, description="List the items after this id.")]
Limit = Annotated[int, Query(ge=1, le=100, description="Most items in the list.")]
Order = Annotated[Literal["asc", "desc"], Query(description="`desc` begins with the last item.")]


@router.post("", response_model=ResponseBody)
async def create_response(
    body: ResponsesRequest, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """Answer a conversation in the form of OpenAI's responses."""
    log_user(request, body.user)
    conversations = _conversations(service, caller)
    history = await conversations.items_before(body.previous_response_id)
    own = await conversations.resolved(items_of(body))
    chat = await begin_chat(request, translate(body, [*history, *own]))

    async def keep(response: Json) -> bool:
        return await conversations.keep(response, own)

    is_kept = body.store is not False and service.config.stored_responses_mib > 0
    name = new_response_id(await _tag(request, body))
    form = ResponseForm(chat.generation, body, name, keep if is_kept else None)
    answer = BlockAnswer(chat.generation, Blocks(chat.reader()), form)
    return await respond(request, answer, stream=bool(body.stream))


@router.post("/input_tokens", response_model=InputTokens)
async def count_input_tokens(
    body: ResponsesRequest, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """The tokens of a response's prompt. Nothing is generated."""
    conversations = _conversations(service, caller)
    history = await conversations.items_before(body.previous_response_id)
    own = await conversations.resolved(items_of(body))
    translated = translate(body, [*history, *own])
    prompt = await chat_prompt(request, translated, due_of(translated, service))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": prompt.num_tokens})


@router.get("/{response_id}", response_model=ResponseBody)
async def get_response(response_id: Id, service: TheService, caller: TheCaller) -> Response:
    """A stored response."""
    return JSONResponse(await _conversations(service, caller).response(response_id))


@router.get("/{response_id}/input_items", response_model=InputItems)
async def list_input_items(
    response_id: Id,
    service: TheService,
    caller: TheCaller,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> Response:
    """The items of a stored response's prompt: its input, after the conversation before it."""
    items = await _conversations(service, caller).input_items(response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        items = _items_after(items, after)
    return page_of(items, limit)


async def cancel_response(response_id: Id, service: TheService, caller: TheCaller) -> Response:
    """Refused: only background responses can be cancelled, and this server runs none."""
    await _conversations(service, caller).response(response_id)
    raise ApiError(
        400,
        "this response is complete: only background responses can be cancelled, and this server "
        "runs none. Close the connection to end an answer",
        param="response_id",
        code="not_cancellable",
    )


# it has no body, so `StrictRoute` must not require a content type
router.add_api_route(
    "/{response_id}/cancel",
    cancel_response,
    methods=["POST"],
    response_model=ResponseBody,
    route_class_override=APIRoute,
)


@router.delete("/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: Id, service: TheService, caller: TheCaller) -> Response:
    """Delete a stored response. Later responses of its conversation can't be continued."""
    await _conversations(service, caller).delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _conversations(service: Service, caller: Caller) -> Conversations:
    return Conversations(service.responses, caller.tenant)


async def _tag(request: Request, body: ResponsesRequest) -> str:
    """The tag of the conversation, from which routers derive the same replica."""
    if body.previous_response_id is not None:
        tag = response_tag(body.previous_response_id)
    else:
        value = json.loads(await request.body())
        tag = affinity_of(value, request.headers.get("x-session-id")).conversation
    return tag or uuid.uuid4().hex[:16]


def _items_after(items: list[Json], name: str) -> list[Json]:
    number = next((n for n, item in enumerate(items) if item["id"] == name), None)
    if number is None:
        raise ApiError(
            404,
            f"after: {name[:128]!r} is no item of this input: leave it out",
            param="after",
            code="item_not_found",
        )
    return items[number + 1 :]
