"""``bench http --self``: ``looseleaf serve`` over a random checkpoint, on a free loopback port."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from looseleaf.errors import LooseleafError

_START_SECONDS = 600.0


@contextmanager
def own_server(folder: Path, device: str) -> Iterator[str]:
    """The URL of a server of the checkpoint in ``folder``; it ends with the context.

    Raises LooseleafError if the server doesn't start."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        command = [sys.executable, "-m", "looseleaf", "serve", str(folder)]
        command += ["--port", "0", "--device", device]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
        with log.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, env=environment)
        try:
            yield _ready_url(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address in the log, when its ``/ready`` answers 200."""
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text(encoding="utf-8").splitlines():
            if '"listening"' in line:
                url = str(json.loads(line)["url"]).rstrip("/")
                if _is_ready(url):
                    return url
        time.sleep(0.05)
    raise LooseleafError(f"the server did not start: {log.read_text(encoding='utf-8')[-500:]}")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False
