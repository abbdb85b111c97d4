"""The reference model with a chat template that shows tools, and streams of named events."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import looseleaf.assets
from tests.server.live import Live, live_server

MODEL = "tooled"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{{ '<tool_call></tool_call><|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ '<|user|>' }}{% else %}"
    "{{ '<|' + message['role'] + '|>' }}{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    "{% if thinking %}{{ '<think>' }}{% elif thinking == 'no' %}{{ '</think>' }}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
}


def tooled_server(folder: Path) -> AbstractContextManager[Live]:
    """A server of the model, whose checkpoint is made in ``folder``."""
    source = Path(looseleaf.assets.__file__).parent / "block"
    for file in source.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return live_server(folder, config={"served_model_name": MODEL})


def named_events(live: Live, path: str, body: Any, **options: Any) -> list[dict[str, Any]]:
    """All events of a stream, whose names are their types."""
    events = []
    with live.client.stream("POST", path, json=body, **options) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for block in response.read().decode().removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events
