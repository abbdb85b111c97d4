"""The parsers by name, and the choice of a parser by a checkpoint's chat template."""

from collections.abc import Mapping

from looseleaf.server.tools.base import ToolParser
from looseleaf.server.tools.gemma import GemmaParser
from looseleaf.server.tools.glm import GlmParser
from looseleaf.server.tools.granite import GraniteParser
from looseleaf.server.tools.harmony import HarmonyParser
from looseleaf.server.tools.hermes import HermesParser
from looseleaf.server.tools.llama import LlamaParser
from looseleaf.server.tools.mistral import MistralParser
from looseleaf.server.tools.phi import PhiParser
from looseleaf.server.tools.pythonic import PythonicParser

# templates of a later parser may contain the markers of an earlier parser, never the reverse
_PARSERS: tuple[type[ToolParser], ...] = (
    HarmonyParser,
    GlmParser,
    GemmaParser,
    MistralParser,
    PhiParser,
    GraniteParser,
    PythonicParser,
    HermesParser,
    LlamaParser,
)

PARSERS: Mapping[str, type[ToolParser]] = {parser.name: parser for parser in _PARSERS}
"""The parsers by the names that ``--tool-parser`` takes."""


def choose_parser(template: str) -> type[ToolParser] | None:
    """The parser of the calls that a chat template writes; None if it writes no known form."""
    return next((parser for parser in _PARSERS if parser.writes(template)), None)
