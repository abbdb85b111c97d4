"""LiteLLM as a library, and its proxy between OpenAI's client and the server."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import litellm
import openai
import pytest

from tests.clients.expected import ANSWER, QUESTION, TOOLS, check_call

MASTER_KEY = "sk-of-the-tests"


@pytest.fixture
def options(server, model):
    return {
        "model": f"hosted_vllm/{model}",
        "api_base": server.api,
        "api_key": "none",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 200,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_completion_answers(options, model, provider):
    answer = litellm.completion(**{**options, "model": f"{provider}/{model}"})
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.prompt_tokens > 0


def test_a_completion_is_streamed(options):
    chunks = litellm.completion(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER


def test_an_asynchronous_completion_answers(options):
    answer = asyncio.run(litellm.acompletion(**options))
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called(options, choice):
    message = litellm.completion(**options, tools=TOOLS, tool_choice=choice).choices[0].message
    check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)


def test_a_text_completion_continues(options, server, model):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=server.api,
        api_key="none",
        prompt="The",
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].text == ANSWER.removeprefix("The")


def test_an_error_has_its_class(options):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**options, "temperature": 9})


@pytest.fixture(scope="module")
def proxied(server, model, tmp_path_factory):
    """OpenAI's client of a proxy before the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"
    config.write_text(
        "model_list:\n  - model_name: archive\n    litellm_params:\n"
        f"      model: hosted_vllm/{model}\n      api_base: {server.api}\n      api_key: none\n"
        f"general_settings:\n  master_key: {MASTER_KEY}\n",
        encoding="utf-8",
    )
    script = Path(sys.executable).with_name("litellm")
    command = [str(script), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    log = config.with_suffix(".log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url + "/health/liveliness", process, config.with_suffix(".log"))
        with openai.OpenAI(base_url=url, api_key=MASTER_KEY, max_retries=0, timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _wait(url, process, log):
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("the proxy did not start")


def proxied_chat(client, **fields):
    body = {"model": "archive", "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**{**body, **fields})


def test_the_proxy_answers(proxied):
    assert proxied_chat(proxied).choices[0].message.content == ANSWER


def test_the_proxy_streams(proxied):
    chunks = proxied_chat(proxied, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER


def test_the_proxy_passes_calls(proxied):
    message = proxied_chat(proxied, tools=TOOLS).choices[0].message
    check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)


def test_the_proxy_passes_errors(proxied):
    with pytest.raises(openai.BadRequestError):
        proxied_chat(proxied, temperature=9)
