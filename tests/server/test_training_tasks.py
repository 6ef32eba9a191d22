"""Tasks on the server's own data: what one rank cannot read or write, all ranks refuse, and none of them waits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from fedplat.aggregate import FedAvg
from fedplat_server.errors import PoolBrokenError, PoolError, PoolMemoryError
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.training import server_training
from fedplat_server.training.server_training import TRIES, ServerTraining
from fedplat_server.workers.task_inputs import EvaluateReply, EvaluateRequest, TrainerReference
from support.daemons import initial_model
from support.ranks.group import RankGroup, Zygote
from support.server_trainers import trainers

LAYOUTS = ("", "shard=2")


@pytest.fixture(scope="module")
def two() -> Generator[RankGroup]:
    """Two ranks."""
    zygote = Zygote()
    with zygote.group(2) as group:
        yield group
    zygote.close()


def ask(two: RankGroup, folder: Path, layout: str, files: tuple[str, str], result: str = "result") -> list[str]:
    """The errors of a training and of an evaluation, which are the same on both ranks."""
    (folder / "model").write_bytes(initial_model().to_bytes())
    reference = trainers(folder)["public"]
    options = {"folder": str(folder), "reference": reference, "layout": layout, "files": files, "result": result}
    two.begin("support.training_tasks:ask", **options)
    of_second = two.result(1)  # if its error were its own, rank 0 would wait
    assert two.result(0) == of_second
    return of_second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_all_ranks_read_is_trained_and_scored(two: RankGroup, layout: str, tmp_path: Path) -> None:
    assert ask(two, tmp_path, layout, ("model", "model")) == ["", ""]
    assert (tmp_path / "result").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_model_that_one_rank_cannot_read_is_refused_by_all(
    two: RankGroup, layout: str, victim: int, tmp_path: Path
) -> None:
    files = ("elsewhere", "model") if victim == 0 else ("model", "elsewhere")
    for error in ask(two, tmp_path, layout, files):
        assert error.startswith(f"the model's file cannot be used on rank {victim}: FileNotFoundError: ")


def test_a_result_that_rank_0_cannot_write_is_refused_by_all(two: RankGroup, tmp_path: Path) -> None:
    training, evaluation = ask(two, tmp_path, "shard=2", ("model", "model"), "no such folder/result")
    assert training.startswith("the result's file cannot be used on rank 0: FileNotFoundError: ")
    assert evaluation == ""


# --- ranks that die, or have too little memory ---


class Ranks:
    """Ranks whose tasks end in these ways, one after the other."""

    def __init__(self, *outcomes: Exception | EvaluateReply) -> None:
        self.outcomes = list(outcomes)

    @contextlib.asynccontextmanager
    async def start_task(self, *_: object) -> AsyncGenerator[Ranks]:
        yield self

    async def result(self, _: object) -> EvaluateReply:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        return


DONE = EvaluateReply(metrics={"accuracy": 0.5})


@pytest.mark.parametrize(
    ("own", "on_cpu", "expected"),
    [
        ([PoolMemoryError("no room")], [DONE], DONE),
        ([PoolMemoryError("no room")], [PoolMemoryError("no room there"), DONE], "no room there"),
        ([PoolBrokenError("died"), DONE], [], DONE),
        ([PoolBrokenError(f"died {number}") for number in range(1, TRIES + 1)] + [DONE], [], f"died {TRIES}"),
    ],
)
async def test_a_task_is_repeated_where_that_may_help(
    own: list[Exception | EvaluateReply],
    on_cpu: list[Exception | EvaluateReply],
    expected: EvaluateReply | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = ServerTraining({"public": "digits:trainer"}, tmp_path, BlobStore(tmp_path / "blobs"), lambda _: None)
    monkeypatch.setattr(training, "_own", Ranks(*own))
    monkeypatch.setattr(training, "_cpu", Ranks(*on_cpu))
    trainer = TrainerReference("digits:trainer", str(tmp_path))
    request = EvaluateRequest(trainer=trainer, rule=FedAvg(), model="model")
    task = server_training._TaskRequest("evaluate", request, None)  # pyright: ignore[reportPrivateUsage]
    run = training._run_task(task, EvaluateReply)  # pyright: ignore[reportPrivateUsage]
    if isinstance(expected, str):
        with pytest.raises(PoolError, match=expected):
            await run
    else:
        assert await run == expected
    await training.close()
