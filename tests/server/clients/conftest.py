"""One running server for all client suites, and the clients that ask it."""

from contextlib import contextmanager

import openai
import pytest

from tests.server.running import running_server


@pytest.fixture(scope="session")
def server():
    with running_server("--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def model(server):
    return server.model


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


def async_client_of(server):
    """The asynchronous client of a server."""
    return openai.AsyncOpenAI(base_url=server.api, api_key=server.key or "none", max_retries=0)


@contextmanager
def client_of(server, **options):
    """The official client, without retries unless they are asked for: a failure is to be seen."""
    options = {"max_retries": 0, "timeout": 60, **options}
    with openai.OpenAI(base_url=server.api, api_key=server.key or "none", **options) as client:
        yield client
