"""Reports: accepted once, repeated safely, or refused for a reason that is reported and kept, and not merged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest

from fedplat import report_validation
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat_server.rpc import report_intake
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file

UPDATE = update_of(initial_model(), 0)
OTHER = update_of(initial_model(), 1)


def altered(change: Callable[[dict[str, np.ndarray]], object]) -> bytes:
    arrays = {name: array.copy() for name, array in UPDATE.items()}
    change(arrays)
    return Parameters.from_arrays(arrays).to_bytes()


def with_value(value: float) -> bytes:
    return altered(lambda arrays: arrays["weight"].fill(value))


def with_padded_header() -> bytes:
    """The same tensors after a header that is valid, but not byte for byte that of the base version."""
    content = UPDATE.to_bytes()
    size = int.from_bytes(content[:8], "little")
    return (size + 8).to_bytes(8, "little") + content[8 : 8 + size] + b" " * 8 + content[8 + size :]


BAD_UPDATES: dict[str, tuple[bytes, str]] = {
    "nan": (with_value(float("nan")), "REJECTED_NONFINITE"),
    "infinity": (with_value(float("inf")), "REJECTED_NONFINITE"),
    "one nan": (altered(lambda a: a["bias"].__setitem__(1, np.nan)), "REJECTED_NONFINITE"),
    "shape": (altered(lambda a: a.update(weight=np.ones((3, 2), np.float32))), "REJECTED_SCHEMA"),
    "dtype": (altered(lambda a: a.update(weight=a["weight"].astype(np.float64))), "REJECTED_SCHEMA"),
    "missing": (altered(lambda a: a.pop("bias")), "REJECTED_SCHEMA"),
    "extra": (altered(lambda a: a.update(more=np.ones(1, np.float32))), "REJECTED_SCHEMA"),
    "header": (with_padded_header(), "REJECTED_SCHEMA"),
    "carry": (Parameters.from_arrays(dict(UPDATE.items()), "max").to_bytes(), "REJECTED_SCHEMA"),
    "cut": (UPDATE.to_bytes()[:-4], "REJECTED_SCHEMA"),
    "long": (UPDATE.to_bytes() + bytes(4), "REJECTED_SCHEMA"),
    "rubbish": (b"\xff" * 300, "REJECTED_SCHEMA"),
    "empty": (b"", "REJECTED_SCHEMA"),
    "huge": ((2**60).to_bytes(8, "little") + b"{}", "REJECTED_SCHEMA"),
}


async def pair(site: Site, **options: object) -> tuple[str, list[RawClient], list[str]]:
    """A job with two clients that work for it; one report is enough when the other is refused."""
    job = await site.operator.start(job_file(goal=2, min_fraction=0.5, **options))  # pyright: ignore[reportArgumentType]
    clients = await site.fleet(2)
    return job, clients, [assignment.token for assignment in await site.assign(clients)]


async def expect_only_good(
    site: Site, job: str, good: RawClient, token: str, bad: RawClient, metrics: Mapping[str, float] | None = None
) -> None:
    """The next version has only the good client's update; the end of the other's assignment is recorded."""
    await good.deliver(token, UPDATE, metrics=metrics)
    await site.operator.until(job, "job", "COMPLETED")
    expected = initial_model().to_vector() + UPDATE.to_vector()
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()
    attempt = (await site.operator.show(job)).current
    assert (attempt.rejected, attempt.reported) == (1, 1)
    recorded = {event.client_id: event for event in await site.operator.events(job) if event.entity == "assignment"}
    assert recorded[bad.client_id].to_state == "REJECTED"
    assert recorded[bad.client_id].reason


async def test_the_bytes_of_accepted_updates_are_counted(site: Site) -> None:
    job, (one, two), tokens = await pair(site)
    await one.deliver(tokens[0], UPDATE)
    await two.report_inline(tokens[1], OTHER.to_bytes())
    await site.operator.until(job, "job", "COMPLETED")
    size = len(UPDATE.to_bytes())
    assert [attempt.update_bytes for attempt in await site.operator.rounds(job)] == [2 * size]
    reported = [event.update_bytes for event in await site.operator.events(job) if event.to_state == "REPORTED"]
    assert reported == [size, size]


async def test_the_rule_that_judges_reports_is_built_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    build = mock.Mock(wraps=report_intake.build_rule)
    monkeypatch.setattr(report_intake, "build_rule", build)
    job, clients, tokens = await pair(site)
    for client, token in zip(clients, tokens, strict=True):
        await client.deliver(token, UPDATE)
    await site.operator.until(job, "job", "COMPLETED")
    assert build.call_count == 1
    other, (client, _), (token, _) = await pair(site)
    await client.deliver(token, UPDATE)
    assert build.call_count == 2
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=other))


@pytest.mark.slow
@pytest.mark.fault("F22", "F23", "F24", "F25")
async def test_updates_that_do_not_fit(site: Site, subtests: pytest.Subtests) -> None:
    for name, (content, reason) in BAD_UPDATES.items():
        with subtests.test(name):
            job, (good, bad), tokens = await pair(site)
            refusal = (await bad.deliver(tokens[1], content)).refusal
            assert (reason_name(refusal.reason), bool(refusal.text)) == (reason, True)
            assert str(site.folder) not in refusal.text
            assert await bad.stop_reason(tokens[1]) == reason
            again = await bad.report(tokens[1], digest_of(content))
            assert reason_name(again.refusal.reason) == reason
            await expect_only_good(site, job, good, tokens[0], bad)


@pytest.mark.slow
@pytest.mark.fault("F26")
async def test_impossible_numbers_of_examples(site: Site, subtests: pytest.Subtests) -> None:
    for num_examples in (0.0, -1.0, float("nan"), float("inf"), float("-inf")):
        with subtests.test(str(num_examples)):
            job, (good, bad), tokens = await pair(site)
            refusal = (await bad.deliver(tokens[1], OTHER, num_examples)).refusal
            assert reason_name(refusal.reason) == "REJECTED_WEIGHT"
            await expect_only_good(site, job, good, tokens[0], bad)


BAD_METRICS: tuple[dict[str, float], ...] = (
    {"loss": float("nan")},
    {"loss": float("inf")},
    {f"m{n}": 0.0 for n in range(65)},
    {"": 1.0},
    {"x" * 101: 1.0},
    {"\x00": 1.0},
)


@pytest.mark.slow
async def test_bad_metrics(site: Site, subtests: pytest.Subtests) -> None:
    for metrics in BAD_METRICS:
        with subtests.test(str(metrics)[:40]):
            job, (good, bad), tokens = await pair(site)
            refusal = (await bad.deliver(tokens[1], OTHER, 1.0, metrics)).refusal
            assert reason_name(refusal.reason) == "REJECTED_METRICS"
            await expect_only_good(site, job, good, tokens[0], bad)


async def test_metrics_that_the_jobs_rule_needs(site: Site, subtests: pytest.Subtests) -> None:
    bad_metrics: tuple[dict[str, float], ...] = ({"loss": 1.0}, {"local_steps": -1.0})
    for metrics in bad_metrics:
        with subtests.test(str(metrics)):
            more = '[updates]\nmax_examples = 1.0\n[aggregation]\nrule = "fednova"'
            job, (good, bad), tokens = await pair(site, more=more)
            refusal = (await bad.deliver(tokens[1], OTHER, 1.0, metrics)).refusal
            assert reason_name(refusal.reason) == "REJECTED_METRICS"
            assert "the job's aggregation rule needs" in refusal.text
            assert "local_steps" in refusal.text
            await expect_only_good(site, job, good, tokens[0], bad, {"local_steps": 4.0})


@pytest.mark.fault("F26")
async def test_huge_numbers_of_examples_are_capped_by_the_job(site: Site) -> None:
    job, clients, tokens = await pair(site, more="[updates]\nmax_examples = 3.0")
    await clients[0].deliver(tokens[0], UPDATE, 1.0)
    await clients[1].deliver(tokens[1], OTHER, 1e15)
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].total_weight == 4.0


@pytest.mark.fault("F24")
async def test_updates_whose_sum_overflows_never_become_a_version(site: Site) -> None:
    more = (
        "[retry]\nbase_s = 0.01\nmax_s = 0.01\nmax_attempts = 1\n[aggregation]\nrule = 'fedavg'\nlearning_rate = 1e30"
    )
    job = await site.operator.start(job_file(goal=1, more=more))
    client = await site.enroll()
    token = (await client.assignment()).token
    assert (await client.deliver(token, with_value(1e20))).HasField("receipt")
    event = await site.operator.until(job, "job", "FAILED")
    assert "not finite" in event.reason
    assert (await site.operator.show(job)).model.version == 0
    assert reason_name((await client.report(token, digest_of(with_value(1e20)))).refusal.reason) == "ATTEMPT_ABANDONED"


@pytest.mark.fault("F12", "F13", "F21")
async def test_a_repeated_report_always_gets_the_first_receipt(folder: Path) -> None:
    content, other = UPDATE.to_bytes(), OTHER.to_bytes()
    async with daemons.running(folder) as site:
        job, (one, two), tokens = await pair(site)
        first = await one.deliver(tokens[0], content, 2.0)
        assert await one.report(tokens[0], digest_of(content), 2.0) == first
        conflict = await one.report(tokens[0], digest_of(other), 2.0)
        assert reason_name(conflict.refusal.reason) == "REJECTED_CONFLICT"
        assert (await two.deliver(tokens[1], content)).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        assert await one.report(tokens[0], digest_of(content), 2.0) == first
        model = await site.operator.export(job)
    async with daemons.running(folder) as site:
        again = RawClient(site.channel, one.key)
        again.client_id = one.client_id
        await again.open_session()
        assert await again.report(tokens[0], digest_of(content), 2.0) == first
        conflict = await again.report(tokens[0], digest_of(other), 2.0)
        assert reason_name(conflict.refusal.reason) == "REJECTED_CONFLICT"
        assert await again.stop_reason(tokens[0], 0.0) == "STALE"
        assert await site.operator.export(job) == model


@pytest.mark.fault("F12")
async def test_the_same_report_at_the_same_time_counts_once(site: Site) -> None:
    job, (one, two), tokens = await pair(site)
    await one.upload(tokens[0], UPDATE.to_bytes())
    digest = digest_of(UPDATE.to_bytes())
    answers = await asyncio.gather(*(one.report(tokens[0], digest) for _ in range(5)))
    assert all(answer == answers[0] and answer.HasField("receipt") for answer in answers)
    await two.deliver(tokens[1], UPDATE)
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].num_updates == 2


async def test_giving_up(site: Site) -> None:
    job, (one, two), tokens = await pair(site)
    text = "no such file\n\x1b[31mred" + "x" * 2000
    for _ in range(2):
        await two.fail(tokens[1], model_pb2.REASON_TRAINER_ERROR, text)
    await one.deliver(tokens[0], UPDATE)
    await site.operator.until(job, "job", "COMPLETED")
    recorded = (await site.operator.reasons(job))[two.client_id]
    assert recorded.startswith("FAILED no such file\n\ufffd[31mred")
    assert len(recorded) < 1100
    answer = await two.report(tokens[1], "0" * 64)
    assert reason_name(answer.refusal.reason) == "TRAINER_ERROR"


async def test_giving_up_for_an_invalid_reason(site: Site) -> None:
    _, clients, tokens = await pair(site)
    for reason in (0, 1, model_pb2.REASON_REJECTED_NONFINITE, 999):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await clients[0].fail(tokens[0], reason)  # pyright: ignore[reportArgumentType]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_heartbeats_tell_the_time_that_is_left(site: Site) -> None:
    client, _ = await site.fleet(2)
    await site.operator.start(job_file(goal=1))
    token = (await client.assignment()).token
    first = (await client.heartbeat(token, 0.0)).proceed.remaining_s
    second = (await client.heartbeat(token, 0.05)).proceed.remaining_s
    assert 3000.0 < second < first <= 3600.0
    assert await client.stop_reason("no such token", 0.0) == "STALE"


@pytest.mark.fault("F34")
async def test_every_heartbeat_is_told_of_the_end_also_after_another_was_cut(site: Site) -> None:
    job, (one, two), tokens = await pair(site)
    heartbeats = [two.heartbeat(tokens[1]) for _ in range(3)]
    await two.query(tokens[1], "0" * 64)  # later than the heartbeats, on the same connection
    heartbeats[0].cancel()
    await two.query(tokens[1], "0" * 64)
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    for beat in heartbeats[1:]:
        assert reason_name((await beat).stop.reason) == "JOB_CANCELLED"
    assert await one.stop_reason(tokens[0]) == "JOB_CANCELLED"


def validate_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes a validation set the first event, and wait for the second one."""
    checking, go_on = threading.Event(), threading.Event()
    check = report_validation.validate_file

    def slow(*args: Any) -> object:
        checking.set()
        assert go_on.wait(daemons.PATIENCE_S)
        return check(*args)

    monkeypatch.setattr(report_validation, "validate_file", slow)
    return checking, go_on


@pytest.mark.parametrize("durability", ["spool", "memory"])
async def test_an_update_whose_assignment_ends_while_it_is_validated_is_deleted(
    site: Site, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """The answer to its report is the reason for the end."""
    checking, go_on = validate_slowly(monkeypatch)
    job = await site.operator.start(f'durability = "{durability}"\n' + job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    content = UPDATE.to_bytes()
    await client.upload(token, content)  # inside the report, it would be validated at once
    report = asyncio.ensure_future(client.report(token, digest_of(content)))
    assert await asyncio.to_thread(checking.wait, daemons.PATIENCE_S)
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    await daemons.until_spool_is_empty(site.folder)
    go_on.set()
    assert reason_name((await report).refusal.reason) == "JOB_CANCELLED"
    await daemons.until_spool_is_empty(site.folder)


@pytest.mark.fault("F13")
async def test_bytes_after_the_report_change_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that appends to its update while its report is checked could stop every round."""
    checking, go_on = validate_slowly(monkeypatch)
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    content = UPDATE.to_bytes()
    await client.upload(token, content)
    report = asyncio.ensure_future(client.report(token, digest_of(content)))
    assert await asyncio.to_thread(checking.wait, daemons.PATIENCE_S)
    for attack in (
        client.upload(token, content + b"more", offset=len(content), digest=digest_of(content)),
        client.upload(token, OTHER.to_bytes()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attack
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    go_on.set()
    assert (await report).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    expected = initial_model().to_vector() + UPDATE.to_vector()
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()


@pytest.mark.fault("F12", "F13")
async def test_small_updates_travel_with_their_report(site: Site) -> None:
    job, (one, two), tokens = await pair(site)
    first = await one.report_inline(tokens[0], UPDATE.to_bytes(), num_examples=3.0)
    assert first.HasField("receipt")
    assert await one.report_inline(tokens[0], UPDATE.to_bytes(), num_examples=3.0) == first
    other = await one.report_inline(tokens[0], OTHER.to_bytes())
    assert reason_name(other.refusal.reason) == "REJECTED_CONFLICT"
    await two.upload(tokens[1], OTHER.to_bytes(), end=100)  # an upload that breaks off
    assert (await two.report_inline(tokens[1], OTHER.to_bytes())).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    total = UPDATE.to_vector() * np.float32(3.0) + OTHER.to_vector()
    expected = initial_model().to_vector() + total / np.float32(4.0)
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()


@pytest.mark.calm("what is too large is refused by a status, and by a refusal when it is sent again")
@pytest.mark.fault("F24", "F25")
async def test_small_updates_that_do_not_fit(site: Site) -> None:
    for content, digest, reason in (
        (UPDATE.to_bytes(), digest_of(OTHER.to_bytes()), "REJECTED_DIGEST"),
        (BAD_UPDATES["nan"][0], None, "REJECTED_NONFINITE"),
        (BAD_UPDATES["shape"][0], None, "REJECTED_SCHEMA"),
    ):
        job, (good, bad), tokens = await pair(site)
        refusal = (await bad.report_inline(tokens[1], content, digest)).refusal
        assert reason_name(refusal.reason) == reason
        await expect_only_good(site, job, good, tokens[0], bad)
    job, (good, bad), tokens = await pair(site)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bad.report_inline(tokens[1], bytes(2**20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for client, token in zip((good, bad), tokens, strict=True):  # such an update has to be uploaded
        assert (await client.deliver(token, UPDATE)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F12")
async def test_the_same_small_update_at_the_same_time_counts_once(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token

    async def report() -> fleet_pb2.ReportResponse:
        while True:
            try:
                return await client.report_inline(token, UPDATE.to_bytes())
            except grpc.aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.ABORTED:  # after ABORTED a client tries again
                    raise

    answers = await asyncio.gather(*(report() for _ in range(8)))
    assert all(answer.HasField("receipt") for answer in answers)
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].num_updates == 1
