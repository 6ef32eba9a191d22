"""A client whose owner does not allow a job, on a server: its session decides how long that counts."""

from __future__ import annotations

from fedplat.wire.v1 import model_pb2
from support.daemons import Site
from support.jobs import job_file


async def test_a_client_that_has_declined_gets_the_job_again_after_its_restart(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    (client,) = await site.fleet(1)
    (assignment,) = await site.assign([client])
    await client.fail(assignment.token, model_pb2.REASON_UNSAFE_AGGREGATION, "the owner requires a larger group")
    assert (await client.refusal()).reason == model_pb2.REASON_NOT_ELIGIBLE
    await client.open_session()
    assert (await client.assignment()).token != assignment.token
