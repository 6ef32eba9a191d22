"""The attempts in which a client has taken part are remembered, also after a restart."""

from __future__ import annotations

from pathlib import Path

from fedplat_client._state.served_attempts import ServedAttempts


def test_an_attempt_is_added_once(tmp_path: Path) -> None:
    served = ServedAttempts(tmp_path / "served")
    assert ("job-1", 1, 1) not in served
    assert served.add("job-1", 1, 1)
    for others in (served, ServedAttempts(tmp_path / "served")):
        assert ("job-1", 1, 1) in others
        assert not others.add("job-1", 1, 1)
    for other in (("job-1", 1, 2), ("job-1", 2, 1), ("job-2", 1, 1), ("1 job-1", 1, 1)):
        assert other not in served
        assert served.add(*other)
    assert ("job-1", 1, 1) in served


def test_the_oldest_attempts_are_forgotten(tmp_path: Path) -> None:
    served = ServedAttempts(tmp_path / "served", limit=3)
    for number in range(5):
        assert served.add("job", 1, number)
    assert [("job", 1, number) in served for number in range(5)] == [False, False, True, True, True]
    assert (tmp_path / "served").stat().st_size == 3 * 16
