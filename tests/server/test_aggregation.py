"""Aggregation when something goes wrong: the coordinator always learns how an attempt ended."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from fedplat.aggregate import Accumulator, Contribution
from fedplat.job import parse_job
from fedplat.rounds import AssignmentId, AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat_server.aggregation import service
from fedplat_server.aggregation.backend import LocalAggregation
from fedplat_server.aggregation.service import Aggregation, AggregationParts
from fedplat_server.database.sql_contents import NO_CONTENTS, SmallContents
from fedplat_server.errors import BlobFullError
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.spool import Spool
from fedplat_server.workers.task_inputs import SpooledUpdate
from support.daemons import digest_of, initial_model, update_of
from support.jobs import job_file

KEY = AttemptKey("j", 1, 1)
UPDATE = update_of(initial_model(), 0).to_bytes()

LOCAL = AggregationParts(
    lambda job, find_job, inputs, blobs: LocalAggregation(inputs, blobs), stores_rows=lambda job: job.job_id == "rows"
)
"""This process aggregates for all jobs."""


class Bench:
    """An aggregation with one job, and the outcomes that it posts."""

    def __init__(self, folder: Path) -> None:
        self.blobs = BlobStore(folder / "blobs")
        self.spool = Spool(folder / "uploads")
        self.outcomes: asyncio.Queue[AttemptAggregated | AggregationFailed] = asyncio.Queue()
        self.aggregation = Aggregation(self.blobs, self.spool, self._find_version, self._post, LOCAL)
        self.contents = NO_CONTENTS
        blob = self.blobs.put_chunks([initial_model().to_bytes()])
        version = ModelVersion(version=0, round=0, attempt=0, digest=blob.digest, size_bytes=blob.size_bytes)
        self.job = JobState("j", parse_job(job_file(goal=1)), version)

    def _post(self, outcome: AttemptAggregated | AggregationFailed, contents: SmallContents) -> None:
        self.contents = contents
        self.outcomes.put_nowait(outcome)

    async def _find_version(self, job_id: str, version: int) -> ModelVersion | None:
        raise AssertionError("no test asks for older versions")

    def receive(self, client_id: str, content: bytes = UPDATE, key: AttemptKey = KEY) -> Fold:
        assignment = AssignmentId(key, client_id)
        self.spool.expect([assignment])
        upload = self.spool.open(assignment, digest_of(content), len(content), 0)
        upload.write(content)
        upload.close()
        return Fold(key, assignment, digest_of(content), Contribution(1.0), 0)

    def submit(self, command: Fold | Restart | Commit) -> None:
        self.aggregation.submit(self.job, command)

    async def outcome(self) -> AttemptAggregated | AggregationFailed:
        return await asyncio.wait_for(self.outcomes.get(), 60.0)


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("as_rows", [True, False])
async def test_only_files_that_the_version_does_not_name_are_looked_up(bench: Bench, as_rows: bool) -> None:
    """For them the database is asked; so a round whose files are all needed has no transaction for it."""
    leftovers: list[str] = []
    bench.aggregation.on_leftovers = leftovers.extend
    bench.job = structs.replace(bench.job, job_id="rows" if as_rows else "j")
    for client_id, is_stored in (("a", True), ("b", False)):
        bench.submit(bench.receive(client_id))
        bench.submit(Commit(KEY, 0, 1))
        outcome = await bench.outcome()
        assert isinstance(outcome, AttemptAggregated)
        digest = outcome.version.digest
        assert (digest in bench.contents.blobs) == as_rows
        bench.aggregation.end(KEY, outcome.version if is_stored else None)
        assert leftovers == [digest] * (not is_stored)


async def test_folds_and_commits(bench: Bench) -> None:
    bench.submit(bench.receive("a"))
    bench.submit(bench.receive("b"))
    bench.submit(Commit(KEY, 0, 2))
    outcome = await bench.outcome()
    assert isinstance(outcome, AttemptAggregated)
    assert (outcome.version.version, outcome.version.num_updates) == (1, 2)
    assert bench.blobs.exists(outcome.version.digest)
    bench.aggregation.end(KEY)
    await bench.aggregation.close()
    assert not vars(bench.aggregation)["_open"]


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [(service.MAX_FOLD_BYTES, [["2", "3", "4"], ["5", "6"]]), (1, [["2"], ["3"], ["4"], ["5"], ["6"]])],
)
async def test_updates_that_wait_are_folded_together_in_their_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, max_bytes: int, expected: list[list[str]]
) -> None:
    fold, calls = LocalAggregation.fold, list[list[str]]()

    async def note(backend: LocalAggregation, updates: Sequence[SpooledUpdate]) -> None:
        calls.append([update.contribution.client_id for update in updates])
        await fold(backend, updates)

    monkeypatch.setattr(LocalAggregation, "fold", note)
    monkeypatch.setattr(service, "MAX_FOLDS", 3)
    monkeypatch.setattr(service, "MAX_FOLD_BYTES", max_bytes)
    folds = [
        dataclasses.replace(each, contribution=Contribution(1.0, client_id=str(number)))
        for number, each in enumerate(map(bench.receive, "abcdefg"))
    ]
    for command in (*folds[:2], Restart(KEY), *folds[2:], Commit(KEY, 0, 5)):
        bench.submit(command)
    outcome = await bench.outcome()
    assert isinstance(outcome, AttemptAggregated)
    assert outcome.version.num_updates == 5
    assert calls == expected
    bench.aggregation.end(KEY)
    await bench.aggregation.close()


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("a bug"), AssertionError(), BlobFullError("full")]
)
@pytest.mark.parametrize("method", ["fold", "parts"])
async def test_whatever_it_dies_of_the_attempt_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, method: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Accumulator, method, fail)
    bench.submit(bench.receive("a"))
    bench.submit(Commit(KEY, 0, 1))
    outcome = await bench.outcome()
    assert isinstance(outcome, AggregationFailed)
    assert outcome.text
    await bench.aggregation.close()


async def test_an_update_that_is_gone_fails_the_attempt(bench: Bench) -> None:
    fold = bench.receive("a")
    bench.spool.discard(AssignmentId(KEY, "a"))
    bench.submit(fold)
    outcome = await bench.outcome()
    assert isinstance(outcome, AggregationFailed)
    assert "the update of a is missing or damaged" in outcome.text
    await bench.aggregation.close()


async def test_abandoned_while_an_update_is_folded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folding, go_on = threading.Event(), threading.Event()
    fold = Accumulator.fold

    def slow(*arguments: object, **keywords: object) -> None:
        folding.set()
        assert go_on.wait(60.0)
        fold(*arguments, **keywords)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Accumulator, "fold", slow)
    bench.submit(bench.receive("a"))
    assert await asyncio.to_thread(folding.wait, 60.0)
    bench.aggregation.end(KEY)
    monkeypatch.undo()
    again = AttemptKey("j", 1, 2)
    bench.submit(bench.receive("a", key=again))
    bench.submit(Commit(again, 0, 1))
    go_on.set()
    outcome = await bench.outcome()
    assert (type(outcome), outcome.key) == (AttemptAggregated, again)
    bench.aggregation.end(again)
    await bench.aggregation.close()
    assert bench.outcomes.empty()


async def test_closing_in_the_middle_posts_nothing(bench: Bench) -> None:
    bench.submit(bench.receive("a"))
    await bench.aggregation.close()
    assert bench.outcomes.empty()


async def test_nothing_grows_with_the_number_of_attempts(bench: Bench) -> None:
    for number in range(1, 20):
        key = AttemptKey("j", 1, number)
        if number % 2:
            bench.submit(Fold(key, AssignmentId(key, "a"), "0" * 64, Contribution(1.0), 0))
            assert isinstance(await bench.outcome(), AggregationFailed)
        bench.aggregation.end(key)
    await bench.aggregation.close()
    assert not vars(bench.aggregation)["_open"]
    assert not vars(bench.aggregation)["_made"]


async def committed(bench: Bench, *commands: Fold | Restart | Commit) -> AttemptAggregated:
    for command in commands:
        bench.submit(command)
    outcome = await bench.outcome()
    assert isinstance(outcome, AttemptAggregated)
    bench.aggregation.end(KEY)
    return outcome


@pytest.mark.fault("F43")
@pytest.mark.parametrize("rule", ["fedavg", "fedadam"])
async def test_after_a_restart_the_bits_are_those_of_an_attempt_without_the_dropped_update(
    tmp_path: Path, rule: str
) -> None:
    huge = initial_model()
    huge.buffer[:] = np.full(huge.schema.num_floating, 3e38, np.float32).view(np.uint8)
    made: list[AttemptAggregated] = []
    for number, is_attacked in enumerate((True, False)):
        bench = Bench(tmp_path / str(number))
        bench.job = structs.replace(bench.job, spec=parse_job(job_file(more=f'[aggregation]\nrule = "{rule}"\n')))
        first, last = (bench.receive(name, update_of(initial_model(), i).to_bytes()) for i, name in enumerate("ac"))
        if is_attacked:
            attack = bench.receive("b", huge.to_bytes())
            attack = dataclasses.replace(attack, contribution=Contribution(1e6))
            commands = (first, attack, last, Restart(KEY), first, last, Commit(KEY, 0, 2))
        else:
            commands = (first, last, Commit(KEY, 0, 2))
        made.append(await committed(bench, *commands))
        await bench.aggregation.close()
    attacked, clean = (outcome.version for outcome in made)
    assert (attacked.num_updates, attacked.total_weight) == (2, 2.0)
    assert (attacked.digest, attacked.state_digest) == (clean.digest, clean.state_digest)


@pytest.mark.fault("F43")
async def test_a_restart_while_an_update_is_folded_forgets_that_one_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folding, go_on = threading.Event(), threading.Event()
    fold = Accumulator.fold

    def slow(*arguments: object, **keywords: object) -> None:
        folding.set()
        assert go_on.wait(60.0)
        fold(*arguments, **keywords)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Accumulator, "fold", slow)
    first = bench.receive("a")
    bench.submit(first)
    bench.submit(bench.receive("b"))
    assert await asyncio.to_thread(folding.wait, 60.0)
    bench.submit(Restart(KEY))
    go_on.set()
    outcome = await committed(bench, first, Commit(KEY, 0, 1))
    assert (outcome.version.num_updates, outcome.version.total_weight) == (1, 1.0)
    await bench.aggregation.close()
