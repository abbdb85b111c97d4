"""Commands of the README and docs/server.md run as printed, against a fresh `looseleaf serve`."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from looseleaf.config import ServerConfig
from tests.server.running import running_server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SERVER_PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
COMMANDS = re.findall(r"```sh\n(curl .*?)```", README, re.DOTALL)[0].split("\n\n")
PRINTED = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


def run(script, server):
    """What a shell prints. The one change: where the server of this test listens."""
    if not shutil.which("curl"):
        message = "no curl on the PATH: install it"
        pytest.fail(message) if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip(message)
    assert PRINTED in script
    script = script.replace(PRINTED, server.url.rstrip("/"))
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text):
    """The JSON objects of a text, one behind another."""
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def test_the_readme_prints_the_address_that_the_server_listens_at_by_itself():
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    assert f"http://{defaults['host']}:{defaults['port']}" == PRINTED
    assert len(COMMANDS) == 1


def test_a_registered_document_is_found_by_its_id(server):
    registered, answer = objects(run(COMMANDS[0], server))
    assert (registered["id"], registered["state"]) == ("handbook", "ready")
    assert "Mira Tolland" in answer["choices"][0]["message"]["content"]
    (document,) = answer["looseleaf"]["documents"]
    assert (document["id"], document["source"]) == ("handbook", "cached")


def test_a_chat_may_have_tokens_of_its_documents_computed_again(server):
    (command,) = re.findall(r"```sh\n(curl .*?)```", SERVER_PAGE, re.DOTALL)
    (answer,) = objects(run(command, server))
    assert "anchor" in answer["choices"][0]["message"]["content"]
    told = answer["looseleaf"]
    assert told["policies"]["fuse"]["selector"] == "links"
    assert [d["recomputed"] > 0 for d in told["documents"]] == [False, True]
