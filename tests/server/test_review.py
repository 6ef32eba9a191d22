"""The jobs that a server shows to the owners of data, and the clients that it draws for jobs that need approval."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from fedplat.config.plugins import BUILTIN
from fedplat.gossip import steps
from fedplat.job import digest_job, digest_text, parse_job
from fedplat.job.terms import calibrate_noise
from fedplat.secure_aggregation import setup
from fedplat.wire.v1 import admin_pb2, fleet_pb2, model_pb2
from fedplat_client._consent import terms
from fedplat_client._state.approvals import OfferedFile
from support import daemons
from support.daemons import Site, digest_of, initial_model
from support.jobs import job_file


def approvals(*digests: str, **rejected: str) -> fleet_pb2.OwnerApprovals:
    found = fleet_pb2.OwnerApprovals(approved=digests)
    for digest, text in rejected.items():
        found.rejected.add(digest=digest, text=text)
    return found


async def test_a_client_reads_the_jobs_of_its_population(site: Site) -> None:
    text = "# IRB 7\n" + job_file(goal=1)
    job = await site.operator.create(text)
    await site.operator.create(job_file(goal=1).replace('population = "demo"', 'population = "others"'))
    ended = await site.operator.start(job_file(goal=1, name="ended"))
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=ended))
    client = await site.enroll()
    (found,) = (await client.review()).jobs
    initial = digest_of(initial_model().to_bytes())
    assert (found.job_id, found.name, found.initial_digest) == (job.job_id, job.name, initial)
    assert found.digest == digest_job(parse_job(text), initial) == digest_text(found.job_file, initial)
    assert found.submitter
    assert "IRB" not in found.job_file
    (again,) = (await client.review([found.digest])).jobs
    assert not again.job_file
    await site.operator.jobs.StartJob(admin_pb2.JobRequest(job=job.job_id))
    assert (await client.assignment()).job_digest == found.digest


async def test_only_clients_whose_owners_approve_a_job_are_drawn(site: Site) -> None:
    job_id = await site.operator.start(job_file(goal=1))
    others, client, free = await site.fleet(3)
    (found,) = (await client.review()).jobs
    for refused in (approvals(), approvals("ab" * 32), approvals(**{found.digest: "not for us"})):
        assert (await others.refusal(approvals=refused)).reason == model_pb2.REASON_NOT_ELIGIBLE
    assignment = await client.assignment(approvals=approvals(found.digest))
    assert assignment.job_id == job_id
    await client.fail(assignment.token, model_pb2.REASON_NOT_APPROVED, "revoked")
    assert (await client.refusal(approvals=approvals())).reason == model_pb2.REASON_NOT_ELIGIBLE
    assert (await free.assignment()).job_id == job_id  # its owner approves no single jobs


@pytest.mark.slow
@pytest.mark.calm("it restarts a daemon")
async def test_a_changed_job_has_another_digest_also_after_a_restart(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll(key="a-client-that-stays")
        (before,) = (await client.review()).jobs
        waiting = client.check_in(approvals=approvals(before.digest), trainers=("another",))
        await site.waiting(1)
        await site.operator.jobs.SetJob(admin_pb2.SetJobRequest(job=job, changes=["retention.versions=2"]))
        (after,) = (await client.review()).jobs
        assert after.digest != before.digest
        waiting.cancel()
        assert (await client.refusal(approvals=approvals(before.digest))).reason == model_pb2.REASON_NOT_ELIGIBLE
        assert (await client.assignment(approvals=approvals(after.digest))).job_digest == after.digest
    async with daemons.running(folder) as site:
        client = await site.enroll(key="a-client-that-stays")
        assert [each.digest for each in (await client.review()).jobs] == [after.digest]


@pytest.mark.slow
async def test_too_much_is_refused(site: Site) -> None:
    client = await site.enroll()
    for call, text in (
        (lambda: client.check_in(approvals=approvals(*["ab" * 32] * 501)), "501 approvals; at most 500"),
        (lambda: client.check_in(approvals=approvals(**{f"{n}": "" for n in range(101)})), "101 rejections"),
        (lambda: client.check_in(approvals=approvals("no digest")), "64 lower-case"),
        (lambda: client.review(["ab" * 32] * 1001), "1001 known digests; at most 1000"),
        (lambda: client.review(page_token="x"), "page_token"),
    ):
        with pytest.raises(Exception, match=text):
            await call()


async def test_a_job_begins_when_its_quorum_has_approved_it(site: Site) -> None:
    """Two of three approve, one rejects: no round, and the operator sees the reason. All three: the round begins."""
    job = await site.operator.start(job_file(goal=2, more="[approval]\npurpose = 'IRB 7'\n"))
    one, two, three = clients = await site.fleet(3)
    (found,) = (await one.review()).jobs
    yes, no = approvals(found.digest), approvals(**{found.digest: "no IRB yet"})
    for client, answer in ((one, yes), (two, yes), (three, no)):
        await client.refusal(approvals=answer)
    shown = await site.operator.show(job)
    assert shown.reason == "waits for approvals: 2 of 3 enrolled clients so far, 3 needed"
    assert not shown.HasField("current")
    assert {*shown.approvals.approved} == {one.client_id, two.client_id}
    assert [(each.client_id, each.text) for each in shown.approvals.rejected] == [(three.client_id, "no IRB yet")]
    assert not shown.approvals.num_silent
    waiting = [client.check_in(approvals=yes) for client in clients]
    assert (await site.operator.until(job, "attempt", "COLLECTING")).round == 1
    for call in waiting:
        call.cancel()


@pytest.mark.slow
async def test_a_revoked_client_is_no_longer_counted(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, more="[approval]\n"))
    one, two = await site.fleet(2)
    (found,) = (await one.review()).jobs
    await one.refusal(approvals=approvals(found.digest))
    assert (await site.operator.show(job)).approvals.silent == [two.client_id]
    await site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=two.client_id))
    await one.refusal(approvals=approvals())
    assert (await one.assignment(approvals=approvals(found.digest))).job_id == job


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "codec": ("[compression.uplink]\ncodec = 'bf16'\n[config]\nepochs = 2\nrate = 0.5\n", {}),
    "secure": (
        "[secure_aggregation]\nconfirm = true\n[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n",
        {"min_fraction": 1.0},
    ),
    "private": (
        "[secure_aggregation]\n[updates]\nweighting = 'uniform'\nclip_norm = 1.0\n[privacy]\ntrust = 'none'\n"
        "participation = 'fixed'\nepsilon = 20.0\ndelta = 1e-6\n",
        {"close": "deadline", "over_selection": 1.0},
    ),
    "gossip": ("[mode]\nkind = 'gossip'\n[updates]\nweighting = 'uniform'\n", {}),
}


@pytest.mark.slow
@pytest.mark.calm("it compares messages")
@pytest.mark.parametrize("name", KINDS)
async def test_what_a_server_assigns_is_the_approved_job(folder: Path, name: str) -> None:
    """A client derives from the text alone what the server sends: of each kind, with the noise of its epsilon."""
    more, selection = KINDS[name]
    async with daemons.running(folder) as site:
        text = job_file(goal=3, more=more, **selection)
        if name == "gossip":  # it draws no clients
            text = re.sub("over_selection = .*\n", "", text)
        await site.operator.start(text)
        clients = await site.fleet(3)
        (found,) = (await clients[0].review()).jobs
        features = (setup.FEATURE, steps.FEATURE)
        calls = [client.assignment(features=features, codecs=("bf16",)) for client in clients]
        for assignment in await asyncio.gather(*calls):
            job = terms.read_offer(found.digest, OfferedFile(found.job_file, found.initial_digest), BUILTIN)
            job = dataclasses.replace(job, spec=calibrate_noise(job.spec))
            assert list(terms.list_differences(job, assignment)) == []


@pytest.mark.slow
@pytest.mark.calm("it compares messages")
async def test_an_evaluation_that_a_server_assigns_is_of_the_approved_job(folder: Path) -> None:
    more = "[config]\nepochs = 2\n[evaluation.clients]\nevaluator = 'scores'\ngoal = 1\n"
    async with daemons.running(folder) as site:
        await site.operator.start(job_file(goal=1, more=more))
        client = await site.enroll()
        (found,) = (await client.review()).jobs
        job = terms.read_offer(found.digest, OfferedFile(found.job_file, found.initial_digest), BUILTIN)
        await client.deliver((await client.assignment()).token, daemons.update_of(initial_model(), 1))
        assignment = await client.assignment(evaluators=("scores",))
        assert assignment.task == fleet_pb2.TASK_EVALUATE
        assert list(terms.list_differences(job, assignment)) == []
