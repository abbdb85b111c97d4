"""Real servers and a proxy in front of them, as processes on loopback that a test may kill."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from looseleaf.errors import InvalidOption, LooseleafError

_START_SECONDS = 600.0


class Command:
    """``looseleaf`` with ``arguments``. Each start listens at the port of the first."""

    def __init__(self, *arguments: str) -> None:
        self._arguments, self._port = arguments, "0"
        self._folder = tempfile.TemporaryDirectory()
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start the process. Raises LooseleafError if it does not listen in time."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
        environment["OMP_NUM_THREADS"] = "1"
        line = [sys.executable, "-m", "looseleaf", *self._arguments, "--port", self._port]
        line += ["--log-format", "json"]
        log = Path(self._folder.name) / "log"
        with log.open("wb") as stream:
            self._process = subprocess.Popen(line, env=environment, stderr=stream)
        end = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            for text in log.read_text(encoding="utf-8").splitlines(keepends=True):
                if '"listening"' in text and text.endswith("\n"):
                    self.url = str(json.loads(text)["url"]).rstrip("/")
                    self._port = self.url.rpartition(":")[2]
                    return
            time.sleep(0.05)
        self.kill()
        raise LooseleafError(f"looseleaf {self._arguments[0]} did not start")

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """End the process by SIGKILL, and start it again at its port."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the process by SIGTERM."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
        self._folder.cleanup()


@dataclass(frozen=True)
class RealFleet:
    """A proxy's URL, its process, and its servers. Under Ray Serve both are Ray's."""

    url: str
    proxy: Command | None = None
    servers: Sequence[Command] = ()


@contextmanager
def fleet_of(number: int, num_pages: int, model: Path | None = None) -> Iterator[RealFleet]:
    """A proxy and its servers, of which each has ``num_pages``."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Command:
            command = Command(*arguments)
            stack.callback(command.close)
            return command

        options = ["serve"] if model is None else ["serve", str(model)]
        options += ["--api-processes", "0", "--num-pages", str(num_pages), "--dtype", "float32"]
        # a start is mostly imports, which take a core each
        with ThreadPoolExecutor(number) as pool:
            servers = [*pool.map(lambda _: start(*options), range(number))]
        proxy = start("route", *(server.url for server in servers))
        wait_until_ready(proxy.url, number)
        yield RealFleet(proxy.url, proxy, servers)


@contextmanager
def ray_fleet(number: int, num_pages: int, model: Path | None = None) -> Iterator[RealFleet]:
    """The same servers under Ray Serve. Raises InvalidOption without Ray."""
    try:
        import ray
        from ray import serve

        from looseleaf.ray import app
    except ImportError as error:
        raise InvalidOption("this arm needs Ray: pip install 'looseleaf[ray]'", "arm") from error
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(
        num_cpus=number + 1,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"replicas": number, "num_pages": num_pages, "dtype": "float32", "device": "cpu"}
        serve.run(app(options | ({} if model is None else {"model": str(model)})))
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, number)
        yield RealFleet(url)
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_ready(url: str, number: int) -> None:
    """Return when the proxy at ``url`` has ``number`` replicas. Raises LooseleafError."""
    end = time.monotonic() + _START_SECONDS
    state = f'"replicas": {number}'
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/ready") as response:
                if state in response.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise LooseleafError("the fleet did not become ready")
