"""From a request's policy fields to the engine's options, and back into its report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from looseleaf.config import Fuse
from looseleaf.engine.outputs import RequestOutput
from looseleaf.errors import InvalidOption
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.policies import FusePolicy


@dataclass(frozen=True)
class Policies:
    """The policies that a request asks for; None is the engine's default."""

    fuse: Fuse | None = None


def take_policies(body: GenerationRequest) -> Policies:
    """What a body asks for. Raises ApiError (400) if it has no meaning."""
    return Policies(fuse=_fuse(body.fuse))


def policies_in_force(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What the report says of one request's policies: those that had an effect on any prompt."""
    fuses = [output.reuse.fuse for output in outputs if output.reuse.fuse is not None]
    return {"fuse": (fuses[0] if fuses else Fuse()).settings(), "select": "all", "revise": 1}


def _fuse(given: FusePolicy | None) -> Fuse | None:
    if given is None:
        return None
    try:
        if isinstance(given, str):
            return Fuse(given)
        fields = given.model_dump(exclude_none=True)
        if "check_layers" in fields:
            fields["check_layers"] = tuple(fields["check_layers"])
        return Fuse(**fields)
    except InvalidOption as error:
        raise ApiError(400, f"fuse: {error}", param="fuse", code="invalid_value") from error
