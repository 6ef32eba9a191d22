"""Rounds with secure aggregation over the wire: the model is that of the integers that no client has shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.secure_aggregation.setup import FEATURE, Setup
from fedplat.wire.v1 import model_pb2
from support import daemons
from support.daemons import Site, initial_model, reason_name
from support.gateways import code_of
from support.jobs import FAR_S, job_file
from support.secure_clients import STEP_S, EndedError, SecureWork, begin_all, expected_model, secure_job, together

SIZE = initial_model().schema.num_floating


async def give_up(work: SecureWork) -> None:
    """The client ends its assignment, as one that dies would be ended by its deadline."""
    await work.ask(lambda client: client.fail(work.token, model_pb2.REASON_CLIENT_STOPPED))


async def begin_job(site: Site, num_clients: int = 5, **options: Any) -> tuple[str, list[SecureWork]]:
    job = await site.operator.start(secure_job(goal=num_clients, **options))
    return job, await begin_all(site, await site.fleet(num_clients), SIZE)


async def completed(site: Site, job: str, survivors: list[SecureWork]) -> None:
    """The job has ended, and its model is that of these clients."""
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model.to_vector().tobytes() == expected_model(initial_model(), survivors).tobytes()
    (_, version) = await site.operator.versions(job)
    assert version.num_updates == len(survivors)


@pytest.mark.fault("S1")
@pytest.mark.parametrize(
    ("dies_before", "confirm"),
    [
        *(("advertise", False), ("share", False), ("report", False), ("report", True), ("finish", False)),
        pytest.param("finish", True, marks=pytest.mark.slow),  # the others wait for its confirmation until the deadline
    ],
)
async def test_sum_is_exact_whenever_a_client_dies(site: Site, dies_before: str, confirm: bool) -> None:
    step_s = FAR_S if dies_before != "finish" else 4.0 if confirm else STEP_S
    job, works = await begin_job(site, confirm=confirm, step_s=step_s)
    *others, dead = works
    if dies_before == "advertise":
        await give_up(dead)
        await together(others, "take_part")
        await completed(site, job, others)
        return
    steps = ["advertise", "share", "mask", "report"]
    steps = steps[: steps.index(dies_before)] if dies_before in steps else steps

    async def die() -> None:
        await together([dead], *steps)
        if dies_before != "finish":  # else its update stays in the sum
            await give_up(dead)

    await asyncio.gather(die(), together(others, "take_part"))
    await completed(site, job, works if dies_before == "finish" else others)
    for work in others:
        sets = {(each.survivors, each.dropped) for each in work.asked}
        assert len(sets) <= 1
        if sets:
            ((survivors, dropped),) = sets
            assert len(survivors) == (5 if dies_before == "finish" else 4)
            assert len(dropped) == (1 if dies_before == "report" else 0)


async def test_groups_are_summed_apart_and_metrics_travel_under_the_masks(site: Site) -> None:
    text = secure_job(6, group=3, metrics={"loss": [0.0, 5.0]}, modulus=26)
    job = await site.operator.start(text)
    works = await begin_all(site, await site.fleet(6), SIZE)
    for number, work in enumerate(works):
        work.metrics = {"loss": 0.5 * number}
    await together(works, "take_part")
    await site.operator.until(job, "job", "COMPLETED")
    shown = (await site.operator.show(job)).current
    assert shown.client_metrics["loss"] == pytest.approx(1.25, abs=1e-3)
    assert shown.merged == 6
    base, sizes = initial_model(), {len(each.survivors) for work in works for each in work.asked}
    assert sizes == {3}
    mean = np.average([work.update for work in works], axis=0, weights=[work.num_examples for work in works])
    assert (await site.operator.model(job)).to_vector() == pytest.approx(base.to_vector() + mean, abs=1e-4)


@pytest.mark.fault("S12")
async def test_a_sum_that_could_overflow_is_refused_with_the_job_file(site: Site) -> None:
    _, text, code = await code_of(site.operator.create(secure_job(100, bits=20, modulus=24)))
    assert (code, "modulus" in text) == ("INVALID_JOB_FILE", True)


@pytest.mark.fault("S12")
async def test_a_reported_update_is_only_masked_bytes(site: Site) -> None:
    # Of seven, four remain after three refusals: enough that the attempt stays open, and a repeated report finds it.
    _, works = await begin_job(site, num_clients=7)
    await together(works, "advertise", "share", "mask")
    first = works[0]
    with pytest.raises(EndedError, match=r"num_examples is 7; expected 1"):
        await first.report(num_examples=7.0)
    second = works[1]
    digest = daemons.digest_of(second.masked)
    await second.ask(lambda client: client.upload(second.token, second.masked))
    response = await second.ask(lambda client: client.report(second.token, digest, 1.0, {"loss": 0.5}))
    assert reason_name(response.refusal.reason) == "REJECTED_METRICS"
    third = works[2]
    third.masked = initial_model().to_bytes()
    with pytest.raises(EndedError, match=r"REJECTED_SCHEMA: the masked update has \d+ bytes; expected"):
        await third.report()


async def test_nothing_is_stored_of_a_client_that_cannot_have_masked_its_update(site: Site, folder: Path) -> None:
    job, works = await begin_job(site)
    for work, in_report in zip(works, [True, False], strict=False):
        work.masked = initial_model().to_bytes()
        if in_report:
            with pytest.raises(EndedError, match="REJECTED_MESSAGE: the update came before the client had its masks"):
                await work.report()
        else:
            upload = work.ask(lambda client, work=work: client.upload(work.token, work.masked))
            _, text, code = await code_of(upload)
            assert (code, "before the client had its masks" in text) == ("STALE_ASSIGNMENT", True)
    assert not [path for path in (folder / "uploads").rglob("*") if path.is_file()]
    assert (await site.operator.show(job)).current.rejected == 2


@pytest.mark.fault("S11")
async def test_an_old_client_works_for_other_jobs_only(site: Site) -> None:
    await site.operator.start(secure_job(goal=3))
    old = await site.enroll()
    assert reason_name((await old.refusal()).reason) == "NOT_ELIGIBLE"
    await site.operator.start(job_file("plain", goal=1))
    assignment = await old.assignment()
    assert (assignment.job_name, assignment.secure_setup) == ("plain", b"")


async def test_the_setup_names_the_attempt_and_the_model(site: Site) -> None:
    job = await site.operator.start(secure_job(goal=3))
    clients = await site.fleet(3)
    assignments = await asyncio.gather(*(client.assignment(features=(FEATURE,)) for client in clients))
    setups = {assignment.secure_setup for assignment in assignments}
    assert len(setups) == 1
    setup = Setup.from_bytes(setups.pop())
    assert (setup.job_id, setup.round, setup.attempt) == (job, 1, 1)
    assert setup.model_digest == assignments[0].model.digest
    assert setup.encoding.size == SIZE
