"""A server in its own process, with API keys, memory use and page counts."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from looseleaf.errors import LooseleafError

OPERATOR_KEY = "key-of-the-operator"
_STATES = ("free", "tails", "referenced", "idle", "pinned")


class ServerProcess:
    """``looseleaf serve`` on the reference model in fp32, one tenant per key. Stops by SIGTERM."""

    model = "looseleaf-reference"

    def __init__(self, keys: Sequence[str], max_queue: int) -> None:
        self.keys = list(keys)
        self._max_queue = max_queue
        self._scratch = tempfile.TemporaryDirectory()
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        folder = Path(self._scratch.name)
        lines = [f"tenant-{n}={key}" for n, key in enumerate(self.keys)]
        lines.append(f"operator={OPERATOR_KEY}")
        (folder / "keys").write_text("\n".join(lines), encoding="utf-8")
        log = folder / "log"
        options = {
            "port": 0,
            "dtype": "float32",
            "api-keys": folder / "keys",
            "max-queue": self._max_queue,
            # small enough to fill early, so that later growth of memory is a leak
            "memory-gib": 0.25,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LOOSELEAF_")}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "looseleaf", "serve", *flags],
                stderr=file,
                env=environment,
            )
        try:
            self.url = self._wait_for_url(log)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._scratch.cleanup()

    def memory(self) -> int:
        """Resident bytes of the server's processes."""
        parent = psutil.Process(self._process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return sum(int(process.memory_info().rss) for process in processes)

    def settled_pages(self, seconds: float = 30.0) -> dict[str, float]:
        """Pages by state when the server is idle, and the number of ``lost`` pages, which are in
        no state, or still in use after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            pages = self._pages()
            active = pages["tails"] + pages["referenced"]
            if not active or time.monotonic() > deadline:
                untracked = pages["total"] - sum(pages[state] for state in _STATES)
                return {**pages, "lost": active + abs(untracked)}
            time.sleep(0.2)

    def _pages(self) -> dict[str, float]:
        request = urllib.request.Request(
            f"{self.url}/metrics", headers={"Authorization": f"Bearer {OPERATOR_KEY}"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        pages = {state: float(values[f'looseleaf_pages{{state="{state}"}}']) for state in _STATES}
        return {**pages, "total": float(values["looseleaf_pool_pages"])}

    def _wait_for_url(self, log: Path) -> str:
        """The server's address, from its log. Raises LooseleafError if it ends before."""
        while self._process.poll() is None:
            for line in log.read_text(encoding="utf-8").splitlines():
                if '"listening"' in line:
                    return str(json.loads(line)["url"]).rstrip("/")
            time.sleep(0.05)
        raise LooseleafError(f"the server did not start: {log.read_text(encoding='utf-8')[-500:]}")
