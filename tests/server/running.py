"""`looseleaf serve` as a process of its own, the way that clients and browsers meet it."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready; ``url`` ends with a slash."""

    url: str
    key: str | None = None

    @property
    def api(self) -> str:
        """What OpenAI's clients call their base URL."""
        return f"{self.url}v1"

    @property
    def model(self) -> str:
        """The name of the first model."""
        return json.loads(self.get("/v1/models"))["data"][0]["id"]

    def get(self, path: str) -> str:
        """The text of an answer to GET."""
        return self._open(urllib.request.Request(self.url + path.lstrip("/")))

    def post(self, path: str, body: Mapping) -> dict:
        """The JSON of an answer to POST."""
        request = urllib.request.Request(self.url + path.lstrip("/"), json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return json.loads(self._open(request))

    def ask(self, question: str, documents: list) -> dict:
        """A chat completion with documents."""
        messages = [{"role": "user", "content": question}]
        return self.post(
            "/v1/chat/completions",
            {"model": self.model, "messages": messages, "documents": documents},
        )

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric; fails unless there is exactly one with these labels."""
        shown = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        pattern = rf"^{name}{re.escape('{' + shown + '}') if labels else ''} (\S+)$"
        (value,) = re.findall(pattern, self.get("/metrics"), re.MULTILINE)
        return float(value)

    def _open(self, request: urllib.request.Request) -> str:
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read().decode("utf-8")


@contextmanager
def running_server(
    *options: str, keys: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[RunningServer]:
    """A server on a free port of this machine, with the reference model unless ``options`` name
    another; ``keys`` gives each tenant its key. It must drain and end by itself when it is told
    to."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    if keys:
        environment["LOOSELEAF_KEYS"] = ",".join(f"{name}={key}" for name, key in keys.items())
    command = [python, "-m", "looseleaf", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        log = _Log(process.stderr)
        yield RunningServer(log.url(), next(iter(keys.values()), None) if keys else None)
        process.terminate()
        assert process.wait(timeout=60) == 0, "".join(log.lines)
    finally:
        process.kill()
        process.wait()
        log.close()


class _Log:
    """Reads a server's log to its end, so that the server never waits for a full pipe."""

    def __init__(self, stream) -> None:
        self.lines: list[str] = []
        self._stream, self._url, self._known = stream, None, threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def url(self) -> str:
        """Where the server listens, once it says so."""
        assert self._known.wait(timeout=120), "".join(self.lines)
        assert self._url, "the server ended at once:\n" + "".join(self.lines)
        return self._url

    def close(self) -> None:
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            self.lines.append(line)
            if match := re.search(r'"url": ?"([^"]+)"', line):
                self._url = match[1]
                self._known.set()
        self._known.set()
