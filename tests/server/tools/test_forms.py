"""Blocks of calls: every text of a family's grammar is what its own parser reads as calls."""

import json
from dataclasses import replace

import pytest

from looseleaf.server.tools.forms import Signature
from looseleaf.server.tools.registry import PARSERS
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
