"""Work of some ranks that takes longer than a collective may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedplat.errors import TrainingError
from fedplat.pytorch.distributed import Ranks, work_in_steps
from support.model_parallel import piped


def copy(count: int, *, fails: bool = False) -> Iterator[int]:
    """Yield after each part, and fail at the end."""
    yield from range(count)
    if fails:
        raise OSError(28, "No space left on device")


def test_ranks_meet_after_each_step_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    gather = Ranks.all_gather

    def record(ranks: Ranks, content: bytes) -> list[bytes]:
        sent.append(content)
        return gather(ranks, content)

    monkeypatch.setattr(Ranks, "all_gather", record)
    with piped.alone() as ranks:
        work_in_steps(ranks, copy(3), "the file")
        assert sent == [b""] * 4
        with pytest.raises(TrainingError, match=r"the file cannot be used on rank 0: OSError: \[Errno 28\] No space"):
            work_in_steps(ranks, copy(1, fails=True), "the file")


def test_the_failure_of_another_rank_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter([[b"", b""], [b"", b"the disk is lost"]])

    def gather(_: Ranks, content: bytes) -> list[bytes]:
        return next(messages)

    monkeypatch.setattr(Ranks, "all_gather", gather)
    with piped.alone() as ranks, pytest.raises(TrainingError, match="the file cannot be used on rank 1: the disk is"):
        work_in_steps(ranks, copy(3), "the file")
    assert not list(messages)
