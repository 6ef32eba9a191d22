"""The handler of the service `Jobs` that deletes a job."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from fedplat.rounds.states import ENDED_JOBS
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.coordination.retention import RetentionTask
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records import audit
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.job_registry import JobRegistry
from fedplat_server.rpc.operator_access import current_operator
from fedplat_server.training.evaluation import EvaluationScheduler


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class JobDeletionService(admin_pb2_grpc.JobsServicer):
    """The method that deletes jobs that have ended. Their data go in the background."""

    jobs: JobRegistry
    store: Store
    evaluation: EvaluationScheduler
    retention: RetentionTask

    @override
    async def DeleteJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.DeleteJobResponse:
        job = self.jobs.find(request.job).state
        if job.status not in ENDED_JOBS:
            text = f"cannot delete a job that is {job.status}; cancel it first, or wait until it ends"
            raise RefusedError(Code.ILLEGAL_ACTION, text)
        if self.evaluation.is_pending(job.job_id):
            raise RefusedError(Code.ILLEGAL_ACTION, "its last version is being evaluated; delete the job after that")
        deletion = self.store.deletion
        num_releases = await deletion.count_releases(job.job_id)
        details = {"name": job.spec.name, "versions": job.latest.version + 1, "releases": num_releases}
        entry = audit.AuditEntry(current_operator(), audit.AuditAction.JOB_DELETED, job.job_id, details)
        await deletion.delete_job(job.job_id, [entry])
        self.jobs.remove(job.job_id)
        self.retention.schedule_job(job.job_id)
        return admin_pb2.DeleteJobResponse(job_id=job.job_id, num_releases=num_releases)
