"""Jobs end within their limits, and processes end with their owner."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf.errors import DeadlineExceeded, EngineClosed, InvalidRequest, LimitExceeded
from looseleaf.sandbox import Limits, Sandbox

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SHORT = Limits(seconds=0.2, mib=64, output=1 << 20)
PATIENT = Limits(seconds=60.0)


def make(source: str) -> Sandbox:
    return Sandbox(
        "templates",
        lambda: {"source": source},
        what="template",
        subject="the template",
        advice="shorten it",
    )


@pytest.fixture
def endless() -> Iterator[Sandbox]:
    sandbox = make("{% if n %}" + ENDLESS + "{% else %}done{% endif %}")
    yield sandbox
    sandbox.close()


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nothing waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: object, seconds: float = 30.0) -> None:
    due = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < due
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ENDLESS, "the template took more than 0.2 s of computing: shorten it"),
        ("{{ '%2000000000d' % 1 }}", "the template took more than 64 MiB of memory: shorten it"),
        ("{{ 'x' * 2000000 }}", "the template took more than 1048576 bytes of output: shorten it"),
    ],
    ids=["time", "memory", "output"],
)
def test_a_job_over_a_limit_ends_with_its_process_and_names_the_limit(
    source: str, words: str
) -> None:
    sandbox = make("{% if n %}" + source + "{% else %}done{% endif %}")
    assert sandbox.call({"n": 0}, SHORT) == "done"
    (first,) = sandbox.pids
    with pytest.raises(LimitExceeded) as caught:
        sandbox.call({"n": 1}, SHORT)
    assert (str(caught.value), caught.value.what) == (words, "template")
    assert has_ended(first)
    # the next caller meets a new process
    assert sandbox.call({"n": 0}, SHORT) == "done"
    assert sandbox.pids != [first]
    sandbox.close()


def test_a_process_serves_job_after_job_and_tells_what_a_job_refuses() -> None:
    sandbox = make("{{ raise_exception(why) if why else 'né \ud800' }}")
    assert [sandbox.call({}) for _ in range(3)] == ["né \ud800"] * 3
    with pytest.raises(InvalidRequest, match="refuses the conversation: because"):
        sandbox.call({"why": "because"})
    assert len(sandbox.pids) == 1
    sandbox.close()
    assert sandbox.pids == []


def test_a_job_ends_at_its_caller_s_deadline(endless: Sandbox) -> None:
    endless.call({"n": 0})
    (pid,) = endless.pids
    with pytest.raises(DeadlineExceeded, match=r"the template was still at work .* shorten it"):
        endless.call({"n": 1}, PATIENT, time.monotonic() + 0.1)
    assert has_ended(pid)


def test_a_close_ends_jobs_at_work_and_tells_their_callers(endless: Sandbox) -> None:
    errors: list[Exception] = []

    def call() -> None:
        try:
            endless.call({"n": 1}, PATIENT)
        except Exception as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: endless.pids)
    (pid,) = endless.pids
    endless.close()
    caller.join(30)
    assert not caller.is_alive()
    assert has_ended(pid)
    assert isinstance(errors[0], EngineClosed)


def test_a_process_that_the_system_ended_is_replaced(endless: Sandbox) -> None:
    endless.call({"n": 0})
    (pid,) = endless.pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: has_ended(pid))
    assert endless.call({"n": 0}) == "done"


def test_processes_go_with_a_sandbox_that_is_not_closed() -> None:
    sandbox = make("x")
    sandbox.call({})
    (pid,) = sandbox.pids
    del sandbox
    assert has_ended(pid)


OWNER = """
import sys
from looseleaf.sandbox import Limits
from tests.sandbox.test_sandbox import ENDLESS, make
import threading
idle, busy = make("x"), make(ENDLESS)
idle.call({})
threading.Thread(target=busy.call, args=({}, Limits(seconds=0.5)), daemon=True).start()
while not busy.pids:
    pass
print(*idle.pids, *busy.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["killed", "exits"])
def test_no_process_outlives_the_one_that_started_it(ending: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OWNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as owner:  # type: ignore[call-overload]
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        if ending == "killed":
            owner.kill()
        else:
            owner.stdin.close()
        owner.wait(30)
    until(lambda: all(map(has_ended, pids)))
