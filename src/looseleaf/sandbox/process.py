"""The parent's side of one child: start it, ask it, end it."""

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
# a job may use its CPU time this many times slower where cores are busy
_PATIENCE, _LEAST_PATIENCE = 10.0, 20.0


@dataclass(frozen=True)
class Limits:
    """What one job may use: ``seconds`` of CPU time, ``mib`` of memory, ``output`` bytes of its
    answer as JSON."""

    seconds: float = 2.0
    mib: int = 512
    output: int = 1 << 26


class Ended(Exception):
    """The child ended, or was ended, inside a job; ``reason`` is time, deadline or memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Child:
    """One process, for one caller at a time. Raises `Ended` if it does not become ready."""

    def __init__(self, job: str, setup: Any, nice: int) -> None:
        self._link, other = socket.socketpair()
        with other:
            # a session of its own: signals of the terminal do not reach it
            self._process = subprocess.Popen(
                command(),
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # threads of a library would count against the limit of memory
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        due = time.monotonic() + _START_SECONDS
        try:
            send(self._link, encode({"job": job, "setup": setup, "nice": nice}), due)
            receive(self._link, due)
        except (OSError, EOFError) as error:
            self.end()
            raise Ended("start") from error

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, request: Any, limits: Limits, due: float) -> dict[str, Any]:
        """The answer, a mapping with one name: value, refused or over.

        Raises `Ended` at ``due`` (monotonic), and if the process ends under the job."""
        patience = max(_LEAST_PATIENCE, _PATIENCE * limits.seconds)
        most = time.monotonic() + patience
        order = {
            "request": request,
            "seconds": limits.seconds,
            "mib": limits.mib,
            "output": limits.output,
        }
        try:
            send(self._link, encode(order), min(due, most))
            answer: dict[str, Any] = receive(self._link, min(due, most))
        except TimeoutError as error:
            self.end()
            raise Ended("deadline" if due < most else "time") from error
        except (OSError, EOFError) as error:
            raise Ended(self._cause()) from error
        return answer

    def _cause(self) -> str:
        status = self.end()
        # a Rust library aborts where it gets no memory; the system's own killer sends SIGKILL
        return "time" if status == -signal.SIGPROF else "memory"

    def end(self) -> int:
        """End the process and wait for it; its exit status."""
        self._process.kill()
        status = self._process.wait()
        self._link.close()
        return status

    def kill(self) -> None:
        """End the process from any thread; the caller who waits for it gets `Ended`."""
        self._process.kill()

    def abandon(self) -> None:
        """In a forked process: close the copy of the socket and leave the child to its parent."""
        self._link.close()
        self._process.returncode = 0
