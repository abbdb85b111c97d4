"""One server for all foreign clients, over the scripted checkpoint.

The server runs under the Python that LOOSELEAF_PYTHON names, and the clients under this one."""

import os
import subprocess
from pathlib import Path

import openai
import pytest

from tests.server.running import running_server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = os.environ.get("LOOSELEAF_PYTHON", str(ROOT / ".venv" / "bin" / "python"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of the scripted checkpoint."""
    folder = tmp_path_factory.mktemp("model") / "scripted"
    subprocess.run([PYTHON, str(HERE / "scripted.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def server(checkpoint):
    """A running server; agents of clients must not report to their makers."""
    options = ("--served-model-name", "local", "--dtype", "float32", "--device", "cpu")
    with running_server(str(checkpoint), *options, python=PYTHON) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def environment(server):
    """The variables that clients read, for the server and without telemetry."""
    values = {
        "OPENAI_BASE_URL": server.api,
        "OPENAI_API_KEY": "none",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": server.url.rstrip("/"),
        "ANTHROPIC_API_KEY": "none",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def model(server):
    return server.model


@pytest.fixture
def client(server):
    """The official client, without retries: a failure must show."""
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        yield client
