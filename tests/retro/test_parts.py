"""The parts by themselves: windows, seen-sets, exposure, and how wide a batch lets a window be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.config import MAX_WINDOW, Revise
from looseleaf.errors import InvalidOption
from looseleaf.retro import (
    Exposure,
    RevisionStates,
    StateShape,
    Window,
    exposure_ratios,
    free_rows,
    mark_read,
    unseen,
    window_for,
)

CPU = torch.device("cpu")


def test_a_window_grows_by_a_row_a_step_up_to_its_width() -> None:
    window = Window()
    rows = []
    for position in range(40, 46):
        window.advance(position, 4, start=30, page_size=16)
        rows.append((window.num_rows, window.first))
    assert rows == [(1, 40), (2, 40), (3, 40), (4, 40), (4, 41), (4, 42)]


def test_a_row_that_has_left_the_window_does_not_come_back() -> None:
    window = Window()
    rows = []
    for position, width in enumerate([4, 4, 4, 1, 4, 4]):
        window.advance(position, width, start=0, page_size=16)
        rows.append(window.first)
    assert rows == [0, 0, 0, 3, 3, 3]


def test_a_step_that_is_made_again_has_the_same_window() -> None:
    window = Window()
    for position in (20, 21, 22, 22):
        window.advance(position, 3, start=0, page_size=4)
    assert (window.num_rows, window.first, window.sealed) == (3, 20, 5)


def test_after_a_gap_or_a_restart_the_window_begins_again() -> None:
    window = Window()
    window.advance(3, 4, start=0, page_size=16)
    window.advance(4, 4, start=0, page_size=16)
    window.advance(6, 4, start=0, page_size=16)
    assert window.num_rows == 1
    window.restart()
    window.advance(7, 4, start=0, page_size=16)
    assert window.num_rows == 1


@given(
    widths=st.lists(st.integers(1, MAX_WINDOW), min_size=1, max_size=80),
    start=st.integers(0, 40),
    length=st.integers(1, 40),
)
def test_sealed_pages_never_change(widths: list[int], start: int, length: int) -> None:
    """No row that is computed stands in a page that was sealed, and pages stay sealed."""
    window, sealed = Window(), 0
    for step, width in enumerate(widths):
        window.advance(start + length + step, width, start, page_size=16)
        assert window.sealed >= sealed
        assert window.first >= start + 16 * window.sealed
        assert window.newly_sealed in (0, window.sealed - sealed)
        sealed = window.sealed


def test_seen_sets_are_those_of_python() -> None:
    generator = torch.Generator().manual_seed(0)
    registers = torch.zeros(1, 2, 12, dtype=torch.uint8)
    history: list[torch.Tensor] = []
    for _ in range(30):
        read = torch.rand(1, 2, 12, generator=generator) < 0.4
        ages = torch.arange(min(len(history), MAX_WINDOW - 1) + 1)
        new = unseen(registers.expand(len(ages), -1, -1), ages)
        for age in ages.tolist():
            seen = torch.zeros(2, 12, dtype=torch.bool)
            for before in history[len(history) - age :]:
                seen |= before[0]
            assert torch.equal(new[age], ~seen)
        registers = mark_read(registers, read)
        history.append(read)


def test_seen_sets_only_grow_while_a_row_is_in_the_window() -> None:
    generator = torch.Generator().manual_seed(1)
    registers = torch.zeros(1, 1, 20, dtype=torch.uint8)
    rows: list[torch.Tensor] = []
    for _ in range(30):
        rows = [torch.zeros(1, 1, 20, dtype=torch.bool), *rows[: MAX_WINDOW - 2]]
        read = torch.rand(1, 1, 20, generator=generator) < 0.3
        registers = mark_read(registers, read)
        # after the step, a row of age i has read what the last i + 1 steps did
        now = [~unseen(registers, torch.tensor([age + 1])) for age in range(len(rows))]
        assert all((before <= after).all() for before, after in zip(rows, now, strict=True))
        rows = now


def test_a_slot_is_nobody_elses_and_states_survive_growth() -> None:
    states = RevisionStates(StateShape(2, 4, 2, 8, CPU), window=3)
    mine = states.take()
    out, lse = torch.randn(2, 4, 8), torch.randn(2, 4)
    slots, places = torch.tensor([mine, mine]), torch.tensor([0, 2])
    states.keep(1, slots, places, out, lse)
    states.make_room(10)
    states.registers[1, mine, :, 9] = 5
    taken = [states.take() for _ in range(9)]
    states.make_room(1000)
    assert len({mine, *taken}) == 10
    kept = states.carried(1, slots, places)
    assert torch.equal(kept.out, out) and torch.equal(kept.lse, lse)
    assert states.registers[1, mine, :, 9].tolist() == [5, 5]
    for slot in (mine, *taken):
        states.free(slot)
    # all are free again, so nothing grows
    size = states.registers.shape[1]
    assert len({states.take() for _ in range(size)}) == size == states.registers.shape[1]


def test_a_new_output_has_seen_nothing_of_what_another_read_in_its_slot() -> None:
    states = RevisionStates(StateShape(2, 2, 1, 4, torch.device("cpu")), window=2)
    states.make_room(20)
    slot = states.take()
    states.registers[:, slot] = 255
    states.free(slot)
    assert states.take() == slot and not states.registers[:, slot].any()


def booked(reads: list[list[int]], sealed: list[int]) -> list[float]:
    """The exposure of eight steps that read these of six pages."""
    registers, exposure = torch.zeros(1, 1, 6, dtype=torch.uint8), Exposure()
    for pages, num_sealed in zip(reads, sealed, strict=True):
        read = torch.zeros(1, 1, 6, dtype=torch.bool)
        read[..., pages] = True
        registers = mark_read(registers, read)
        exposure.book(registers, num_sealed)
    return exposure_ratios(exposure.totals())


def test_exposure_counts_the_union_of_the_steps_behind() -> None:
    reads = [[0, 1], [1, 2], [1, 3], [0], [], [], [4], [1]]
    assert booked(reads, [6] * 8) == [1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.5, 2.5]
    assert booked(reads[:7], [6] * 7) == [1.0] * 8


def test_pages_that_were_not_sealed_at_a_rows_step_are_not_its_exposure() -> None:
    reads = [[0], [0, 1], *[[1]] * 6]
    assert booked(reads, [1, *[2] * 7]) == [1.0] * 8


def test_the_window_falls_to_one_as_the_batch_grows() -> None:
    windows = [window_for(8, outputs, free=64) for outputs in (1, 8, 9, 16, 32, 33, 64, 500)]
    assert windows == [8, 8, 7, 4, 2, 1, 1, 1]
    assert window_for(1, 1, free=64) == 1


def test_a_gpu_bears_many_more_rows_than_a_cpu() -> None:
    cpu, gpu = free_rows(CPU, 4), free_rows(torch.device("cuda"), 2)
    assert cpu < 32 < gpu


@pytest.mark.parametrize("window", [0, -1, MAX_WINDOW + 1])
def test_a_window_that_no_byte_holds_is_refused(window: int) -> None:
    with pytest.raises(InvalidOption, match="1 to 9"):
        Revise(window)
