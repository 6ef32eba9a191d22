"""Work of rank 0 that takes longer than a collective may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedplat.errors import TrainingError
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.server import trainer
from support.model_parallel import piped


def copy(count: int, *, fails: bool = False) -> Iterator[int]:
    """Yield after each part, and fail at the end."""
    yield from range(count)
    if fails:
        raise OSError(28, "No space left on device")


def test_rank_0_informs_the_others_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    broadcast = Ranks.broadcast

    def record(ranks: Ranks, content: bytes = b"") -> bytes:
        sent.append(content)
        return broadcast(ranks, content)

    monkeypatch.setattr(Ranks, "broadcast", record)
    with piped.alone() as ranks:
        trainer.wait_for_first(ranks, lambda: copy(5), "the file")
        assert sent == [b"end "], "short work needs one message"
        sent.clear()
        monkeypatch.setattr(trainer, "_MEET_S", 0.0)
        trainer.wait_for_first(ranks, lambda: copy(3), "the file")
        assert sent == [b"alive"] * 3 + [b"end "]
        with pytest.raises(TrainingError, match=r"the file cannot be used on rank 0: OSError: \[Errno 28\] No space"):
            trainer.wait_for_first(ranks, lambda: copy(1, fails=True), "the file")


def test_a_rank_waits_until_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter([b"alive", b"alive", b"end the file is lost"])

    def receive(_: Ranks, content: bytes = b"") -> bytes:
        return next(messages)

    monkeypatch.setattr(Ranks, "broadcast", receive)
    with piped.alone() as ranks:
        ranks.rank = 1
        with pytest.raises(TrainingError, match="the file is lost"):
            trainer.wait_for_first(ranks, lambda: copy(3), "the file")
    assert not list(messages)
