"""Options come from flags, then the environment, then a file, then the configuration's defaults."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from looseleaf.cli import app
from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from looseleaf.errors import InvalidOption, LooseleafError

Serve = Callable[..., tuple[Any, ServerConfig, dict[str, Any]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """What the command would serve, instead of serving it; raises what it is refused with."""
    made: list[tuple[Any, ServerConfig, dict[str, Any]]] = []
    monkeypatch.setattr(
        "looseleaf.server.service.make_service", lambda *arguments: made.append(arguments[:3])
    )
    monkeypatch.setattr("looseleaf.server.run.serve", lambda _: 0)
    monkeypatch.setattr(
        "looseleaf.server.processes.supervisor.default_processes", lambda device, cores: 0
    )

    def run(*arguments: str, **environment: str) -> tuple[Any, ServerConfig, dict[str, Any]]:
        done = CliRunner().invoke(app, ["serve", *arguments], env=environment)
        if isinstance(done.exception, LooseleafError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return made.pop()

    return run


def test_without_options_the_defaults_of_the_configuration_hold(serve: Serve) -> None:
    assert serve() == (None, ServerConfig(), {})


def test_flags_win_over_the_environment_and_that_over_the_file(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "looseleaf.toml"
    path.write_text('model = "a"\nport = 1001\nmax_queue = 11\ndeadline = 5.5\nnum_pages = 7\n')
    model, config, engine = serve(
        "--config", str(path), "--port", "1003", LOOSELEAF_PORT="1002", LOOSELEAF_MAX_QUEUE="12"
    )
    assert model == "a"
    assert (config.port, config.max_queue, config.deadline) == (1003, 12, 5.5)
    assert engine == {"num_pages": 7}
    model, config, _ = serve("b", LOOSELEAF_CONFIG=str(path), LOOSELEAF_MODEL="c")
    assert (model, config.port) == ("b", 1001)


def test_system_prompts_may_be_several_from_flags_and_from_a_file(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "looseleaf.toml"
    path.write_text('system_prompt = ["a.txt", "b=b.txt"]\n')
    assert serve("--config", str(path))[1].system_prompt == ("a.txt", "b=b.txt")
    given = ("--system-prompt", "x.txt", "--system-prompt", "y=y.txt")
    assert serve(*given)[1].system_prompt == ("x.txt", "y=y.txt")


@pytest.mark.parametrize(
    "content",
    [
        "ports = 1",
        "port = [1]",
        "[server]\nport = 1",
        "port =",
        "max_queue = 1.5",
        "port = true",
        "open_metrics = 1",
        "warm_up = 2.5",
        'tracing = "yes"',
    ],
)
def test_a_file_with_something_unknown_is_refused(
    serve: Serve, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "looseleaf.toml"
    path.write_text(content)
    with pytest.raises(InvalidOption, match=r"looseleaf\.toml"):
        serve("--config", str(path))


def test_switches_of_a_file_are_true_or_false(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "looseleaf.toml"
    path.write_text("open_metrics = true\nwarm_up = false\n")
    config = serve("--config", str(path))[1]
    assert config.open_metrics and not config.warm_up


def test_an_empty_name_of_a_model_is_refused(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "looseleaf.toml"
    path.write_text('model = ""\n')
    for given in (("",), ("--config", str(path))):
        with pytest.raises(InvalidOption, match="empty"):
            serve(*given)


def test_an_unknown_variable_is_refused(serve: Serve) -> None:
    with pytest.raises(InvalidOption, match="LOOSELEAF_PROT"):
        serve(LOOSELEAF_PROT="1")
    serve(LOOSELEAF_COMMIT="0123456789ab")  # what rows of results are told, no option


LINKS = {
    "LOOSELEAF_SERVICE_HOST": "10.0.0.1",
    "LOOSELEAF_SERVICE_PORT": "8000",
    "LOOSELEAF_SERVICE_PORT_HTTP": "8000",
    "LOOSELEAF_PORT": "tcp://10.0.0.1:8000",
    "LOOSELEAF_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "LOOSELEAF_PORT_8000_TCP_PROTO": "tcp",
    "LOOSELEAF_PORT_8000_TCP_PORT": "8000",
    "LOOSELEAF_PORT_8000_TCP_ADDR": "10.0.0.1",
    "LOOSELEAF_BIG_MODEL_SERVICE_HOST": "fd00::1",
    "LOOSELEAF_BIG_MODEL_PORT": "tcp://[fd00::1]:8000",
    "LOOSELEAF_NAME": "/web/looseleaf",
}


def test_variables_of_a_service_or_a_container_of_this_name_are_no_options(serve: Serve) -> None:
    assert serve(**LINKS) == (None, ServerConfig(), {})
    # what is set by hand stays
    others = {name: value for name, value in LINKS.items() if name != "LOOSELEAF_PORT"}
    assert serve(**others, LOOSELEAF_PORT="1002")[1].port == 1002
    assert serve(LOOSELEAF_SERVED_MODEL_NAME="/a/b")[1].served_model_name == "/a/b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOOSELEAF_SERVICE_HOST", "a name"),
        ("LOOSELEAF_PORT_8000_TCP", "8000"),
        ("LOOSELEAF_NAME", "big"),
        ("LOOSELEAF_HOSTS_PORT", "80"),
    ],
)
def test_a_variable_with_such_a_name_and_another_value_is_refused(
    serve: Serve, name: str, value: str
) -> None:
    with pytest.raises(InvalidOption, match=rf"{name}.*enableServiceLinks"):
        serve(**{name: value})


def test_every_option_is_a_flag_with_its_default_and_its_help() -> None:
    text = " ".join(
        CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output.split()
    )
    sections = (ServerConfig, EngineConfig, CacheConfig, SchedulerConfig)
    for option in (f for s in sections for f in dataclasses.fields(s) if "help" in f.metadata):
        assert f"--{option.name.replace('_', '-')}" in text
        assert option.metadata["help"] in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"port": 70_000}, "port"),
        ({"max_queue": 0}, "max_queue"),
        ({"deadline": -1.0}, "deadline"),
        ({"document_template": "no place"}, "{text}"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        ServerConfig(**fields)
