"""Threads of a CPU: a setting wins, quotas bound, and on busy cores few are taken."""

from collections.abc import Iterator

import pytest
import torch

from looseleaf import LLM
from looseleaf.cli.options import ENGINE_SECTIONS, field_names
from looseleaf.machine import threads
from looseleaf.machine.threads import fewest_waits, fit_threads, time_each


@pytest.fixture(autouse=True)
def eight_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "measure", lambda most: dict.fromkeys((4, 2, 1), 1.0))
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


BUSY = {4: 33.0, 2: 31.0, 1: 5.0}


@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        ({4: 1.0, 2: 1.9, 1: 3.7}, 4),
        ({4: 1.2, 2: 1.0, 1: 1.3}, 4),
        ({4: 30.0, 2: 2.0, 1: 3.9}, 2),
        (BUSY, 1),
        ({1: 5.0}, 1),
    ],
)
def test_as_many_threads_are_taken_as_do_not_wait_for_cores(
    seconds: dict[int, float], number: int
) -> None:
    assert fewest_waits(seconds) == number


def test_on_busy_cores_few_threads_compute_and_the_choice_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "measure", lambda most: BUSY)
    choice = fit_threads(None, on_cpu=True)
    assert (choice.threads, choice.most, torch.get_num_threads()) == (1, 4, 1)
    assert str(choice) == (
        "computing with 1 of 4 threads: the cores are busy, and 4 threads took 7 times as long; "
        "the option threads or OMP_NUM_THREADS overrides this"
    )
    # what was chosen, or set by the caller, is not raised again
    assert fit_threads(None, on_cpu=True).threads == 1


def test_on_idle_cores_all_of_the_quota_compute() -> None:
    assert fit_threads(None, on_cpu=True).threads == 4
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("asked", [None, 3])
def test_a_setting_wins_over_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, asked: int | None
) -> None:
    monkeypatch.setattr(threads, "measure", lambda most: BUSY)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    choice = fit_threads(asked, on_cpu=True)
    assert choice.threads == torch.get_num_threads() == (asked or 8)
    assert ("option threads" if asked else "OMP_NUM_THREADS") in str(choice)


def test_beside_a_gpu_only_the_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "measure", lambda most: BUSY)
    assert fit_threads(None, on_cpu=False).threads == 4


def test_every_number_of_threads_is_timed_in_turn_and_the_first_left_set() -> None:
    seen: list[int] = []
    seconds = time_each([4, 2, 1], lambda: seen.append(torch.get_num_threads()))
    assert seen[:6] == [4, 4, 2, 2, 1, 1]
    assert set(seconds) == {4, 2, 1}
    assert torch.get_num_threads() == 4


def test_the_library_and_every_command_take_the_option() -> None:
    assert "threads" in field_names(*ENGINE_SECTIONS)
    with LLM(device="cpu", num_pages=16, threads=1) as llm:
        assert llm.engine.threads is not None
        assert llm.engine.threads.threads == torch.get_num_threads() == 1
