"""Real servers of the reference model, and a proxy in front of them, as processes on loopback."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from looseleaf.errors import LooseleafError

_START_SECONDS = 120.0


@contextmanager
def fleet_of(number: int, num_pages: int) -> Iterator[tuple[str, list[str]]]:
    """The URL of a proxy, and those of its servers, of which each has ``num_pages``."""
    with ExitStack() as stack:
        options = ("--api-processes", "0", "--num-pages", str(num_pages), "--dtype", "float32")
        servers = [stack.enter_context(_running("serve", *options)) for _ in range(number)]
        proxy = stack.enter_context(_running("route", *servers))
        _wait_until_ready(proxy, number)
        yield proxy, servers


@contextmanager
def _running(*arguments: str) -> Iterator[str]:
    """The URL of a command that listens at a free port."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
    environment["OMP_NUM_THREADS"] = "1"
    line = [sys.executable, "-m", "looseleaf", *arguments, "--port", "0"]
    # after the address the log would fill a pipe that is not read
    line += ["--log-format", "json"]
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    drain = None
    try:
        url = None
        for text in process.stderr:
            match = re.search(r'"url": ?"(http[^"]+)/"', text)
            if "listening" in text and match:
                url = match[1]
                break
        if url is None:
            raise LooseleafError(f"looseleaf {arguments[0]} did not start")
        drain = subprocess.Popen(
            [sys.executable, "-c", "import sys\nfor _ in sys.stdin.buffer: pass"],
            stdin=process.stderr,
        )
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()
        if drain is not None:
            drain.wait(15)


def _wait_until_ready(url: str, number: int) -> None:
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


def direct(urls: Sequence[str]) -> Iterator[str]:
    """The servers in turn, for ever."""
    while True:
        yield from urls
