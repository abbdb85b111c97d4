"""The AI SDK: its default model of OpenAI's provider, chats, and the compatible provider.

Needs Node and npm, which installs the packages beside a copy of the probes."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.expected import ANSWER

PROBES = Path(__file__).parent / "ai_sdk"
KINDS = ("responses", "chat", "compatible")


@pytest.fixture(scope="module")
def results(server, model, tmp_path_factory):
    """The result of each probe by its name."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("ai_sdk")
    shutil.copytree(PROBES, folder, dirs_exist_ok=True)
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(install, cwd=folder, check=True, timeout=600)
    command = ["node", "probes.mjs", server.api, model]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_generated(results, kind):
    result = results[f"{kind} text"]
    assert (result.get("text"), result.get("reason")) == (ANSWER, "stop"), result
    assert result["tokens"] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_streamed(results, kind):
    result = results[f"{kind} stream"]
    assert (result.get("text"), result.get("reason")) == (ANSWER, "stop"), result
    assert result["pieces"] > 3


@pytest.mark.parametrize("kind", ["responses", "chat"])
def test_an_object_is_generated(results, kind):
    result = results[f"{kind} object"]
    assert result.get("wing") in ("north", "south"), result
    assert isinstance(result["floor"], int)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_tool_is_called(results, kind):
    result = results[f"{kind} call"]
    assert result.get("name") == "get_weather", result
    assert result["input"]["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("probe", ["agent", "streamed_agent"])
def test_an_agent_calls_its_tool_and_answers(results, kind, probe):
    result = results[f"{kind} {probe}"]
    assert result.get("text") == ANSWER, result
    assert result.get("steps", 2) == 2 and result.get("called", True)
