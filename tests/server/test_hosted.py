"""A hosted document of ten times the pool, through a server that is started twice on one folder."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer, running_server

PAGES = 8
TEXT = "The boat house of the lake club is kept by Runa Feld, who has the key. " * 52
# what stands before it moves the document to another place
BEFORE: tuple[list[dict[str, str]], ...] = ([], [{"text": "The lake lies in the north."}])


def answers(server: RunningServer, document: str) -> list[Any]:
    return [
        server.post(
            "/v1/chat/completions",
            {
                "model": server.model,
                "messages": [{"role": "user", "content": "Who keeps the boat house?"}],
                "documents": [*before, {"id": document}],
                "select": {"policy": "retrieval", "tokens": 120},
                "temperature": 0,
                "max_tokens": 12,
                "ignore_eos": True,
            },
        )["choices"]
        for before in BEFORE
    ]


def test_ten_times_the_pool_is_answered_at_two_places_and_is_back_after_a_restart(
    tmp_path: Path,
) -> None:
    body = {"id": "club", "text": TEXT, "hosted": True, "index": "graph"}
    said, steps = [], []
    for _ in range(2):
        options = ("--num-pages", str(PAGES), "--disk-path", str(tmp_path), "--dtype", "float32")
        with running_server(*options) as server:
            document = server.post("/v1/documents", body)
            assert (document["state"], document["pages"]) == ("ready", 0)
            assert document["tokens"] >= 10 * 16 * PAGES
            steps.append(server.metric("looseleaf_step_seconds_count"))
            said.append(answers(server, "club"))
            read = server.metric("looseleaf_hosted_keys_read_total")
            keys = server.metric("looseleaf_hosted_keys_total")
            assert read / keys == pytest.approx(120 / document["tokens"], rel=0.05)
    assert said[0] == said[1]
    # keys and index come from the disk: nothing is computed
    assert steps[0] > 0 == steps[1]
