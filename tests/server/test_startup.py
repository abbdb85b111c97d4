"""What a server does once before it listens."""

import gc
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from looseleaf.cli.serve import serve as serve_command
from looseleaf.config import ServerConfig
from looseleaf.engine.runner.runner import Runner
from looseleaf.errors import InvalidOption
from looseleaf.server import run
from looseleaf.server.ports import require_free
from looseleaf.server.service import make_service
from tests.checkpoints import make_checkpoint
from tests.server.live import live_server


@pytest.mark.parametrize("warm_up", [True, False])
def test_graphs_are_captured_and_progress_is_told_unless_nobody_wants_that(
    monkeypatch: pytest.MonkeyPatch, warm_up: bool
) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    def capture(runner: Runner, on_progress: Any) -> None:
        on_progress("graphs", 1, 1)

    monkeypatch.setattr(Runner, "warm_up", capture)
    service = make_service(None, ServerConfig(warm_up=warm_up), {"num_pages": 64}, tell)
    service.llm.close()
    assert told == ([("graphs", 1, 1)] if warm_up else [])


@pytest.fixture
def signals() -> Iterator[None]:
    """What signals did before a server took them over they do again."""
    before = [
        (one, signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    ]
    yield
    for one, handler in before:
        signal.signal(one, handler)


SIGNALLED = """
import os, signal
from looseleaf.cli.signals import exit_on_sigterm
exit_on_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
print("it goes on")
"""


@pytest.mark.parametrize(
    ("around", "status"),
    [
        ((), -signal.SIGTERM),
        # the first process of its own namespace, as in a container
        (("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"), 143),
    ],
    ids=["a process", "the first process"],
)
def test_sigterm_before_a_server_listens_ends_it(around: tuple[str, ...], status: int) -> None:
    if around and subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of processes can be made here")
    command = [*around, sys.executable, "-c", SIGNALLED]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (status, b""), ended.stderr


@pytest.mark.usefixtures("signals")
def test_the_command_heeds_signals_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heeded = []

    def load(*_: object) -> None:
        heeded.append(signal.getsignal(signal.SIGTERM))
        raise InvalidOption("planted")

    monkeypatch.setattr("looseleaf.server.service.make_service", load)
    CliRunner().invoke(serve_command, ["--port", "0"])
    assert heeded and callable(heeded[0])


def test_an_address_in_use_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(serve_command, ["no-such-model", "--port", str(port)])
        assert isinstance(result.exception, InvalidOption)
        assert f"port {port}" in str(result.exception)
    require_free("127.0.0.1", port)
    require_free("localhost", 0)


@pytest.mark.usefixtures("signals")
def test_what_stays_is_not_looked_through_by_the_collector_while_a_server_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(run.Server, "run", lambda server: frozen.append(gc.get_freeze_count()))
    run.serve(make_service(None, ServerConfig(port=0), {"num_pages": 64}))
    # one behind the end must not take the place of the exit status
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() < 1000


def test_a_text_with_a_token_that_the_model_does_not_have_is_a_wrong_request(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path, vocab_size=261)
    with live_server(folder) as live:
        name = live.service.base_model.name
        asked = {"model": name, "max_tokens": 2}
        for path, body in (
            ("/v1/completions", {"prompt": "a travel"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a travel"}]}),
            ("/v1/documents", {"text": "a travel"}),
        ):
            answer = live.post(path, body if "text" in body else {**asked, **body})
            assert answer.status_code == 400
            assert "has the token 'Ġtravel'" in answer.json()["error"]["message"]
        assert live.post("/v1/completions", {**asked, "prompt": "zq"}).status_code == 200


def test_what_a_request_leaves_out_is_as_generation_config_advises(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path)
    advice = {"temperature": 0.0, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    with live_server(folder, {"log_level": "info"}) as live:
        body = {"model": live.service.base_model.name, "prompt": "who signs", "ignore_eos": True}

        def answer(**fields: Any) -> str:
            made = live.post("/v1/completions", {**body, **fields}).json()
            return str(made["choices"][0]["text"])

        assert answer() == answer(**advice) == answer(temperature=None, repetition_penalty=1.5)
        assert answer() != answer(repetition_penalty=1.0)
        asked = {"messages": [{"role": "user", "content": "who"}], "max_tokens": 8, "seed": 1}
        told = [live.chat(**{**body, **asked, "prompt": None, **f}) for f in ({}, advice)]
        assert told[0].json()["choices"] == told[1].json()["choices"]
    (line,) = (one for one in capfd.readouterr().err.splitlines() if "sampling_defaults" in one)
    told_at_start = json.loads(line)
    assert {name: told_at_start[name] for name in advice} == advice


def test_advice_is_left_alone_if_the_operator_says_so(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    for taken in (True, False):
        service = make_service(str(folder), ServerConfig(generation_config=taken), {"num_pages": 8})
        assert service.advice == ({"temperature": 0.5} if taken else {})
        service.llm.close()
