"""The attempts in which a client has taken part are remembered, also after a restart."""

from __future__ import annotations

from pathlib import Path

from fedplat_client._state.two_phase import ServedAttempts


def test_an_attempt_is_added_once(tmp_path: Path) -> None:
    served = ServedAttempts(tmp_path / "served")
    assert served.is_new("job-1", 1, 1)
    assert served.add("job-1", 1, 1)
    for others in (served, ServedAttempts(tmp_path / "served")):
        assert not others.is_new("job-1", 1, 1)
        assert not others.add("job-1", 1, 1)
    for other in (("job-1", 1, 2), ("job-1", 2, 1), ("job-2", 1, 1), ("1 job-1", 1, 1)):
        assert served.is_new(*other)
        assert served.add(*other)
    assert not served.is_new("job-1", 1, 1)


def test_the_oldest_attempts_are_forgotten(tmp_path: Path) -> None:
    served = ServedAttempts(tmp_path / "served", limit=3)
    for number in range(5):
        assert served.add("job", 1, number)
    assert [served.is_new("job", 1, number) for number in range(5)] == [True, True, False, False, False]
    assert (tmp_path / "served").stat().st_size == 3 * 16
