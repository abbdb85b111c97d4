"""From a request's policy fields to the engine's options, and from outputs to the report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from looseleaf.config import Fuse, Revise, Select
from looseleaf.errors import InvalidOption
from looseleaf.llm.client import Output
from looseleaf.prompt.request import Policies
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.policies import FusePolicy, ReviseChoice, SelectChoice


def parse_policies(body: GenerationRequest) -> Policies:
    """The policies of a request. Raises ApiError (400) for invalid options."""
    select = _select(body.select)
    return {
        "fuse": _fuse(body.fuse),
        "select": select,
        "revise": _revise(body.revise, select),
    }


def effective_policies(outputs: Sequence[Output]) -> dict[str, Any]:
    """The policies that had an effect on any prompt, for the report."""
    fuses = [output.reuse.fuse for output in outputs if output.reuse.fuse is not None]
    selects = [output.select.select for output in outputs if output.select is not None]
    revises = [output.revision.revise for output in outputs if output.revision is not None]
    return {
        "fuse": (fuses[0] if fuses else Fuse()).settings(),
        "select": (selects[0] if selects else Select("all")).settings(),
        "revise": asdict(revises[0]) if revises else 1,
    }


def _fuse(choice: FusePolicy | None) -> Fuse | None:
    with _errors_of("fuse"):
        return None if choice is None else Fuse(**_fields(choice, "selector"))


def _select(choice: SelectChoice | None) -> Select | None:
    with _errors_of("select"):
        return None if choice is None else Select(**_fields(choice, "policy"))


def _fields(choice: str | BaseModel, name_field: str) -> dict[str, Any]:
    """The options of a policy; a plain string is the value of ``name_field``."""
    if isinstance(choice, str):
        return {name_field: choice}
    fields = choice.model_dump(exclude_none=True)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Turns an InvalidOption into an ApiError (400) that names the field ``name``."""
    try:
        yield
    except InvalidOption as error:
        text = error.named(lambda option: f"{name}.{option}")
        message = text if error.options else f"{name}: {text}"
        raise ApiError(400, message, param=name, code="invalid_value") from error


def _revise(choice: ReviseChoice | None, select: Select | None) -> Revise | None:
    """None for a window of 1, which means no revision."""
    if choice is None:
        return None
    revise = Revise(choice) if isinstance(choice, int) else Revise(**choice.model_dump())
    if revise.window == 1:
        return None
    if select is None or select.policy == "all":
        message = "revise needs a select policy: without one every token reads all keys; add select"
        raise ApiError(400, message, param="revise", code="invalid_value")
    return revise
