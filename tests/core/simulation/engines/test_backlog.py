"""The queue of training tasks for workers: their order, and how unwanted tasks are dropped."""

from __future__ import annotations

import pytest

from fedplat.simulation.engines.interface import ClientTask
from fedplat.simulation.engines.tasks import Versions, WorkQueue

LENGTHS = {0: 10.0, 1: 30.0, 2: 20.0, 3: 30.0}
WORKS = [ClientTask(client, 7, 0) for client in LENGTHS]


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def backlog(forgotten: list[int]) -> WorkQueue[str]:
    """Four tasks of a version that is already retired: it is forgotten when the last of them ends."""
    versions = Versions(forgotten.append)
    backlog = WorkQueue[str](versions, LENGTHS.__getitem__)
    backlog.begin(WORKS)
    versions.retire(7)
    return backlog


def drawn(backlog: WorkQueue[str]) -> list[int]:
    return [work.client for _, work in iter(backlog.draw, None)]


def test_the_longest_is_drawn_first_and_of_equals_the_first(backlog: WorkQueue[str]) -> None:
    assert drawn(backlog) == [1, 3, 2, 0]


def test_an_answer_is_fetched_once_and_ends_the_work(backlog: WorkQueue[str], forgotten: list[int]) -> None:
    numbers = {work: number for number, work in iter(backlog.draw, None)}
    for work in WORKS:
        assert not backlog.has_answer(work)
        assert backlog.put(numbers[work], f"of {work.client}")
        assert backlog.has_answer(work)
    assert [backlog.fetch(work) for work in WORKS[:3]] == ["of 0", "of 1", "of 2"]
    assert not forgotten
    assert WORKS[3] in backlog
    assert backlog.fetch(WORKS[3]) == "of 3"
    assert WORKS[3] not in backlog
    assert forgotten == [7]


def test_a_work_that_is_dropped_before_it_is_drawn_is_never_trained(
    backlog: WorkQueue[str], forgotten: list[int]
) -> None:
    for work in WORKS:
        assert backlog.drop(work) is None
    assert drawn(backlog) == []
    assert forgotten == [7]


def test_the_answer_to_a_dropped_work_is_not_kept(backlog: WorkQueue[str], forgotten: list[int]) -> None:
    numbers = {work: number for number, work in iter(backlog.draw, None)}
    for work in WORKS[1:]:
        backlog.drop(work)
        assert not forgotten  # the worker that trains it still needs the version
        assert not backlog.put(numbers[work], "late")
    assert backlog.put(numbers[WORKS[0]], "early")
    assert backlog.drop(WORKS[0]) == "early"
    assert forgotten == [7]


def test_numbers_are_given_once(backlog: WorkQueue[str]) -> None:
    numbers = {backlog.new_number(), *(number for number, _ in iter(backlog.draw, None))}
    backlog.begin([ClientTask(0, 7, 1)])
    found = backlog.draw()
    assert found is not None
    assert len(numbers | {found[0]}) == len(WORKS) + 2
