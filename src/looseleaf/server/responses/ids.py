"""Ids of responses and of the items of their outputs.

A response's id has the tag of its conversation, by which routers find its replica. An item's id has
the digits of its response and its index."""

import re
import uuid

from looseleaf.server.blocks import Kind

_PREFIXES: dict[Kind, str] = {"thought": "rs", "text": "msg", "call": "fc"}
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})_([0-9]{1,6})")


def new_response_id(tag: str) -> str:
    """A new id with the tag of a conversation."""
    return f"resp_{tag}{uuid.uuid4().hex}"


def item_id(response_id: str, kind: Kind, index: int) -> str:
    """The id of an output's item."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{index}"


def input_id(response_id: str, index: int) -> str:
    """The id of an input's item that has none."""
    return f"in_{response_id.removeprefix('resp_')}_in{index}"


def place_of(item: str) -> tuple[str, int] | None:
    """The response and the index of an output's item; None for an id that is none."""
    match = _ITEM.fullmatch(item)
    return None if match is None else (f"resp_{match.group(1)}", int(match.group(2)))
