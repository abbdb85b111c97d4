"""The processes of the other ranks, which rank 0 starts, watches and ends."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

_JOIN_SECONDS = 45.0
"""Time for a rank to end its writes to tiers."""


class RankProcesses:
    """Ranks 1 to ``size - 1`` on this host, and rank 0's connections to them.

    Each calls ``main`` of ``module`` with its rank and the number of its connection's file. Its
    standard input ends with rank 0, and ends it."""

    def __init__(self, module: str, size: int) -> None:
        self.connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._lock = threading.Lock()
        try:
            for rank in range(1, size):
                self._start(module, rank)
        except BaseException:
            self.kill()
            raise

    def _start(self, module: str, rank: int) -> None:
        own, theirs = Pipe()
        # the modules of this process, wherever it found them
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            f"from {module} import main; main(*map(int, sys.argv[2:]))"
        )
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), str(rank), str(number)],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                # a new session shields it from signals of the terminal
                start_new_session=True,
            )
        self.connections.append(own)
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def watch(self, on_end: Callable[[int], None]) -> None:
        """Call ``on_end`` with the first rank that ends before `close`, in a thread."""
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._wait, args=(rank, process, on_end), name="looseleaf-rank", daemon=True
            ).start()

    def _wait(
        self, rank: int, process: subprocess.Popen[bytes], on_end: Callable[[int], None]
    ) -> None:
        process.wait()
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            on_end(rank)
            self.kill()

    def close(self) -> None:
        """End the ranks: they finish their writes to tiers within a time limit."""
        with self._lock:
            self._closing = True
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_JOIN_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the ranks now."""
        with self._lock:
            self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
