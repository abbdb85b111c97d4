"""Blocks of calls: every text of a family's grammar is what its own parser reads as calls."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from looseleaf.config import ServerConfig
from looseleaf.models import Tokenizer
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.schema_limits import require_small
from looseleaf.server.tools.choice import tool_grammar
from looseleaf.server.tools.forms import Signature
from looseleaf.server.tools.registry import PARSERS
from tests.clients.scripted import write_checkpoint
from tests.engine.schema_walks import RandomModel, fits

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"enum": ["x", "]}", '"']}},
        "required": ["a"],
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}
SIGNATURES = [Signature(name, json.dumps(schema)) for name, schema in SCHEMAS.items()]
TEMPLATES = [
    ("hermes", ""),
    ("llama3_json", ""),
    ("mistral", ""),
    ("mistral", "[ARGS]"),
    ("mistral", "[CALL_ID] [ARGS]"),
    ("granite", ""),
    ("phi", "functools["),
    ("phi", ""),
    ("harmony", ""),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return RandomModel(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_forced_texts_are_calls(model: RandomModel, name: str, template: str) -> None:
    parser = PARSERS[name]
    block = parser.block(SIGNATURES, template, 3)
    assert block is not None
    grammar = replace(block, trigger="").grammar()
    numbers = set()
    for seed in range(12):
        text = model.draw(grammar, seed)
        if text is None:
            continue
        parsed = parser.parse(text, SCHEMAS)
        assert parsed.content == ""
        assert 1 <= len(parsed.calls) <= 3
        numbers.add(len(parsed.calls))
        for call in parsed.calls:
            assert fits(SCHEMAS[call.name], json.loads(call.arguments))
    assert numbers


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_a_trigger_begins_its_block(name: str, template: str) -> None:
    block = PARSERS[name].block(SIGNATURES, template, 1)
    assert block is not None and block.trigger
    rest = block if block.before.startswith(block.trigger) else replace(block, before="")
    assert rest.without_trigger() != rest


def test_forms_without_a_grammar_say_so() -> None:
    without = {name for name, parser in PARSERS.items() if parser.block(SIGNATURES, "") is None}
    assert without == {"gemma", "glm", "pythonic"}


def test_definitions_above_the_limits_are_free_under_auto_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    tokenizer, few = Tokenizer(tmp_path), ServerConfig(max_schema_properties=1)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMAS["f"]}}]
    fields = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    auto, forced = ChatRequest(**fields), ChatRequest(**fields, tool_choice="required")
    assert tool_grammar(auto, tokenizer, few) is None
    assert tool_grammar(auto, tokenizer, ServerConfig()) is not None
    with pytest.raises(ApiError, match="2 properties"):
        require_small(tool_grammar(forced, tokenizer, few), few)
