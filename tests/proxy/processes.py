"""Servers and a proxy as processes, which tests may kill."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Running:
    """A process of the command line that listens at ``url``."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """End it without a chance to say so."""
        self.process.kill()
        self.process.wait()


@contextmanager
def command(log: Path, *arguments: str) -> Iterator[Running]:
    """``looseleaf`` with a port of its own; ``log`` gets its standard error."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    line = [sys.executable, "-m", "looseleaf", *arguments, "--port", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            for text in process.stderr:
                stream.write(text)
                if found := re.search(
                    r'"url": ?"(http[^"]+)/", ("threads|"event": "listening)', text
                ):
                    break
            assert found, log.read_text()
            yield Running(found[1], process)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


@contextmanager
def fleet(folder: Path, number: int, *options: str) -> Iterator[tuple[Running, list[Running]]]:
    """A proxy in front of ``number`` servers of the reference model."""
    with ExitStack() as stack:
        serve = ("serve", "--api-processes", "0", "--num-pages", "256", "--log-level", "info")
        servers = [
            stack.enter_context(command(folder / f"{n}.log", *serve, *options))
            for n in range(number)
        ]
        urls = [server.url for server in servers]
        yield stack.enter_context(command(folder / "route.log", "route", *urls)), servers
