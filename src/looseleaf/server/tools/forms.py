"""Blocks of calls in the forms of families, as grammars for forced calls and for `auto`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.engine.sampling.call_blocks import Call, CallItem


@dataclass(frozen=True)
class Signature:
    """A function's name and the JSON schema of its arguments.

    An inexact schema that can't be followed becomes that of any object."""

    name: str
    schema: str
    exact: bool = True

    def call(self, before: str, after: str = "") -> Call:
        """A call with its arguments as JSON between two texts."""
        arguments = CallItem(schema=self.schema, exact=self.exact)
        return tuple(
            item
            for item in (CallItem(before), arguments, CallItem(after))
            if item.schema or item.text
        )


def json_calls(
    signatures: Sequence[Signature], *, key: str = "arguments", before: str = "", after: str = ""
) -> tuple[Call, ...]:
    """Objects with the name and the arguments of a call, between two texts."""
    return tuple(
        signature.call(f'{before}{{"name": {json.dumps(signature.name)}, "{key}": ', "}" + after)
        for signature in signatures
    )
