"""The parent's handle of one child process: start, request, end."""

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from looseleaf.sandbox.child import command
from looseleaf.sandbox.frames import encode, receive, send

_START_SECONDS = 60.0
# wall time per second of CPU time, for busy cores, and its minimum in seconds
_PATIENCE, _MIN_PATIENCE = 10.0, 20.0


@dataclass(frozen=True)
class Limits:
    """Limits of one job: ``seconds`` of CPU time, ``mib`` of memory, ``output`` bytes of JSON."""

    seconds: float = 2.0
    mib: int = 512
    output: int = 1 << 26


class ChildEnded(Exception):
    """A child ended during a job: ``reason`` is time, deadline, memory, start or closed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Child:
    """One child process for one caller at a time. Raises `ChildEnded` if its start fails."""

    def __init__(self, job: str, setup: Any, nice: int) -> None:
        self._link, child_link = socket.socketpair()
        with child_link:
            # a new session shields it from signals of the terminal
            self._process = subprocess.Popen(
                command(),
                stdin=child_link.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # stacks of library threads would count against the memory limit
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        due = time.monotonic() + _START_SECONDS
        try:
            send(self._link, encode({"job": job, "setup": setup, "nice": nice}), due)
            receive(self._link, due)
        except (OSError, EOFError) as error:
            self.end()
            raise ChildEnded("start") from error

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def request(self, request: Any, limits: Limits, due: float) -> dict[str, Any]:
        """The answer, a mapping with one key: value, refused or over.

        Raises `ChildEnded` at ``due`` (monotonic), and if the process ends during the job."""
        timeout = time.monotonic() + max(_MIN_PATIENCE, _PATIENCE * limits.seconds)
        order = {
            "request": request,
            "seconds": limits.seconds,
            "mib": limits.mib,
            "output": limits.output,
        }
        try:
            send(self._link, encode(order), min(due, timeout))
            answer: dict[str, Any] = receive(self._link, min(due, timeout))
        except TimeoutError as error:
            self.end()
            raise ChildEnded("deadline" if due < timeout else "time") from error
        except (OSError, EOFError) as error:
            raise ChildEnded(self._cause()) from error
        return answer

    def _cause(self) -> str:
        status = self.end()
        # a Rust library aborts without memory, and the kernel's OOM killer sends SIGKILL
        return "time" if status == -signal.SIGPROF else "memory"

    def end(self) -> int:
        """End the process and wait for it; its exit status."""
        self._process.kill()
        status = self._process.wait()
        self._link.close()
        return status

    def kill(self) -> None:
        """End the process from any thread; a waiting `request` raises `ChildEnded`."""
        self._process.kill()

    def abandon(self) -> None:
        """After a fork: close this copy of the socket and leave the child to its parent."""
        self._link.close()
        self._process.returncode = 0
