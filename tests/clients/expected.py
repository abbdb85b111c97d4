"""Answers of the scripted checkpoint, and the tools that tests offer."""

import json

ANSWER = "The archive is in the north wing."
THOUGHT = "Let me see!"
QUESTION = [{"role": "user", "content": "Where is the archive?"}]

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {
    "name": "get_time",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]


def check_call(name, arguments):
    """A call of TOOLS fits its schema."""
    value = json.loads(arguments)
    if name == "get_time":
        assert value == {}
        return
    assert name == "get_weather"
    assert set(value) == {"city", "days"}
    assert value["city"] in ("Oslo", "Rome")
    assert isinstance(value["days"], int)
