"""What the deployment files name exists: metrics, options, variables, paths."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from looseleaf.cli import app
from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption
from looseleaf.server.processes.supervisor import _KILL_SECONDS
from looseleaf.server.run import _CLOSING_SECONDS
from looseleaf.server.service import STEP_PATIENCE
from looseleaf.tiers.tiers import _CLOSE_SECONDS, _JOIN_SECONDS
from tests.server.running import running_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "looseleaf.service").read_text("utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
EXAMPLE = tomllib.loads((DEPLOY / "serve.toml").read_text("utf-8"))


def expressions():
    """Every query of the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def served_options():
    """What `looseleaf serve --help` names."""
    shown = CliRunner().invoke(app, ["serve", "--help"])
    assert shown.exit_code == 0
    return set(re.findall(r"--[a-z][a-z0-9-]*", shown.output))


def directives(key):
    """The values of one key of the unit."""
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


@pytest.fixture(scope="module")
def exposed():
    """Metric names, and the label names that each is seen with, after one request to a server that
    has a tier."""
    with running_server("--host-gib", "0.01") as server:
        server.ask("Where is the archive?", [{"text": "The archive is in the north wing."}])
        text = server.get("/metrics")
    seen = {}
    for name, labels in re.findall(r"^([a-z_]+)(?:\{([^}]*)\})? ", text, re.MULTILINE):
        seen.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return seen


def test_every_metric_and_label_of_the_dashboard_is_exposed(exposed):
    queries = expressions()
    assert len(queries) > 30
    # the labels that Prometheus itself adds when it scrapes
    scraped = {"instance", "job"}
    for query in queries:
        names = re.findall(r"looseleaf_\w+", query)
        assert names
        labels = {*re.findall(r"[{,]\s*(\w+)=", query)} - scraped
        for by in re.findall(r"by \(([^)]*)\)", query):
            labels |= {label.strip() for label in by.split(",")} - scraped
        for name in names:
            assert name in exposed, query
        assert labels <= set().union(*(exposed[name] for name in names)), query


def test_every_value_of_a_label_that_a_query_picks_exists(exposed):
    picked = [re.findall(r'(?:source|kind|path|end)=~?"([^"$]*)"', q) for q in expressions()]
    values = {value for found in picked for pattern in found for value in pattern.split("|")}
    assert values <= {"cached", "computed", "awaited", "loaded", "grouped", "deadline"}


def test_what_tiers_do_is_on_the_dashboard():
    shown = set(re.findall(r"looseleaf_tier_\w+", " ".join(expressions())))
    for name in ("loads_total", "writes_total", "bytes", "evicted_total", "faults_total"):
        assert f"looseleaf_tier_{name}" in shown


def test_what_only_grows_is_a_counter(exposed):
    assert "looseleaf_made_ready_total" in exposed
    assert "looseleaf_made_ready" not in exposed


def test_the_panels_have_names_and_places_of_their_own():
    panels = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_units_command_and_the_images_are_commands_of_ours():
    (start,) = directives("ExecStart")
    program, *arguments = shlex.split(start)
    image = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
    # options of the unit stand in its file: a flag would win over that
    assert [Path(program).name, *arguments] == ["looseleaf", "serve"]
    assert image[:2] == ["looseleaf", "serve"]
    options = {word for word in image if word.startswith("--")}
    assert options and options <= served_options()


def test_both_let_the_server_drain_before_it_is_killed():
    # the engine's last step, documents on their way to tiers, and what has to be said
    behind = STEP_PATIENCE + _CLOSE_SECONDS + _CLOSING_SECONDS
    (limit,) = directives("TimeoutStopSec")
    assert float(limit) >= EXAMPLE["drain_seconds"] + behind
    (limit,) = re.findall(r"--stop-timeout (\d+)", DOCKERFILE)
    assert float(limit) >= ServerConfig().drain_seconds + behind


def test_the_engine_ends_within_the_limit_of_its_parent_and_that_within_the_stated_one():
    assert _KILL_SECONDS > STEP_PATIENCE + _CLOSE_SECONDS + _JOIN_SECONDS
    page = (ROOT / "docs" / "server.md").read_text("utf-8")
    (stated,) = re.findall(r"wait (\d+) s longer than the drain", page)
    (example,) = re.findall(r"by (\d+) seconds or more", (DEPLOY / "serve.toml").read_text("utf-8"))
    assert stated == example
    assert float(stated) >= _KILL_SECONDS + _CLOSING_SECONDS
    (limit,) = directives("TimeoutStopSec")
    assert float(limit) >= EXAMPLE["drain_seconds"] + float(stated)
    (limit,) = re.findall(r"--stop-timeout (\d+)", DOCKERFILE)
    assert float(limit) >= ServerConfig().drain_seconds + float(stated)


def unit_environment(path):
    """What the unit sets, with its file of options somewhere else."""
    assert "LOOSELEAF_CONFIG=/etc/looseleaf/serve.toml" in directives("Environment")
    return {"LOOSELEAF_CONFIG": str(path)}


@pytest.mark.parametrize("content", ["not even TOML [[[", None])
def test_the_units_file_is_read_and_one_that_is_wrong_or_missing_is_not_tried_again(
    tmp_path, content
):
    path = tmp_path / "serve.toml"
    if content is not None:
        path.write_text(content)
    refused = CliRunner().invoke(app, ["serve"], env=unit_environment(path))
    assert isinstance(refused.exception, InvalidOption)
    assert "serve.toml" in str(refused.exception)
    # which is what `main` turns such an error into
    assert directives("RestartPreventExitStatus") == ["2"]
    assert directives("Restart") == ["on-failure"]


def test_the_example_file_is_one_of_options(monkeypatch):
    served = []
    monkeypatch.setattr(
        "looseleaf.server.service.make_service", lambda *given: served.append(given)
    )
    monkeypatch.setattr("looseleaf.server.run.serve", lambda _: 0)
    monkeypatch.setattr(
        "looseleaf.server.processes.supervisor.default_processes", lambda device, cores: 0
    )
    monkeypatch.setattr("looseleaf.server.ports.require_free", lambda host, port: None)
    text = (DEPLOY / "serve.toml").read_text("utf-8")
    ended = CliRunner().invoke(app, ["serve"], env=unit_environment(DEPLOY / "serve.toml"))
    assert ended.exit_code == 0, ended.output
    assert served[0][1].drain_seconds == EXAMPLE["drain_seconds"]
    commented = re.findall(r"^# (\w+) = ", text, re.MULTILINE)
    options = {f"--{name.replace('_', '-')}" for name in (*commented, *EXAMPLE)}
    assert commented and options - {"--model"} <= served_options()


def test_the_image_has_what_the_kernels_and_the_options_of_a_server_need():
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.search(r"^RUN apt-get .*\bgcc libc6-dev\b", last, re.MULTILINE)
    installed = re.findall(r"pip install '\.\[([^]]*)\]'", DOCKERFILE)
    assert len(installed) == 2
    assert all({"serve", "redis", "tracing"} <= set(extras.split(",")) for extras in installed)


def test_every_variable_that_is_named_is_read_by_the_server():
    variables = set(re.findall(r"LOOSELEAF_[A-Z_]+[A-Z]", DOCKERFILE + UNIT))
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert variables and all(variable in sources for variable in variables)


def test_what_the_image_copies_is_there_and_let_through():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for source in line.split()
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    # what the package's metadata names must be there when pip builds it
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= set(copied)


def test_the_image_does_not_run_as_root_and_asks_after_its_health():
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    user = re.findall(r"^USER (\w+)$", last, re.MULTILINE)
    assert user and user != ["root"]
    assert "HEALTHCHECK" in last


def test_the_images_health_check_tells_a_server_from_none():
    (found,) = re.findall(r"^  CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    python, *arguments = json.loads(found)
    assert python == "python"

    def check(url):
        command = [sys.executable, *(a.replace("http://127.0.0.1:8000/", url) for a in arguments)]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode

    with running_server(keys={"team": "a-secret-key"}) as server:
        assert check(server.url) == 0
    assert check(server.url) != 0
