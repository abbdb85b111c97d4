"""From a request's policy fields to the engine's options, and back into its report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from looseleaf.config import Fuse, Revise, Select
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import Policies
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.policies import FusePolicy, ReviseChoice, SelectChoice


def take_policies(body: GenerationRequest) -> Policies:
    """What a body asks for. Raises ApiError (400) if it has no meaning."""
    select = _select(body.select)
    return {
        "fuse": _fuse(body.fuse),
        "select": select,
        "revise": _revise(body.revise, select),
    }


def policies_in_force(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What the report says of one request's policies: those that had an effect on any prompt."""
    fuses = [output.reuse.fuse for output in outputs if output.reuse.fuse is not None]
    selects = [output.select.select for output in outputs if output.select is not None]
    revises = [output.revision.revise for output in outputs if output.revision is not None]
    return {
        "fuse": (fuses[0] if fuses else Fuse()).settings(),
        "select": (selects[0] if selects else Select("all")).settings(),
        "revise": asdict(revises[0]) if revises else 1,
    }


def _fuse(given: FusePolicy | None) -> Fuse | None:
    with _refused("fuse"):
        return None if given is None else Fuse(**_fields(given, "selector"))


def _select(given: SelectChoice | None) -> Select | None:
    with _refused("select"):
        return None if given is None else Select(**_fields(given, "policy"))


def _fields(given: str | BaseModel, word: str) -> dict[str, Any]:
    """The options that are given, where a policy may be one ``word``; lists are of layers."""
    if isinstance(given, str):
        return {word: given}
    fields = given.model_dump(exclude_none=True)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """What a policy refuses, as the caller is told."""
    try:
        yield
    except InvalidOption as error:
        told = error.named(lambda option: f"{name}.{option}")
        message = told if error.options else f"{name}: {told}"
        raise ApiError(400, message, param=name, code="invalid_value") from error


def _revise(given: ReviseChoice | None, select: Select | None) -> Revise | None:
    """None for a window of 1, which is how things are without one."""
    if given is None:
        return None
    revise = Revise(given) if isinstance(given, int) else Revise(**given.model_dump())
    if revise.window == 1:
        return None
    if select is None or select.policy == "all":
        message = "revise: nothing is selected, so earlier tokens have read everything: give select"
        raise ApiError(400, message, param="revise", code="invalid_value")
    return revise
