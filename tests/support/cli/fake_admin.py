"""A scripted server for operators on a loopback port; its `State` survives it, as a database would."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import grpc

from fedplat.config.plugins import Plugins
from fedplat.job import parse_job
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from support.cli.fake_state import ENDED, T0, S, State, Status

ROWS_OF_A_PAGE = 2
Row = TypeVar("Row")


class _Service:
    def __init__(self, state: State) -> None:
        self.state = state

    def _check(self, context: grpc.ServicerContext) -> None:
        self.state.tokens.append(str(dict(context.invocation_metadata()).get("authorization")))
        if self.state.refusal is not None:
            if self.state.refusal_code:
                context.set_trailing_metadata(
                    (("fedplat-code", self.state.refusal_code), ("fedplat-retry-s", self.state.retry))
                )
            _refuse(context, *self.state.refusal)

    def _page(self, rows: Iterable[Row], request: Any) -> tuple[list[Row], str, int]:
        """A page of few rows, whatever size is asked for, the token of the next, and the number of all rows."""
        found, start = list(rows), int(request.page_token or 0)
        if getattr(request, "newest_first", False):
            found.reverse()
        end = start + min(request.page_size or ROWS_OF_A_PAGE, ROWS_OF_A_PAGE)
        return found[start:end], str(end) if end < len(found) else "", len(found) if self.state.counts else 0


class FakeJobs(_Service, admin_pb2_grpc.JobsServicer):
    def UploadModel(self, request_iterator: Iterator[admin_pb2.UploadModelRequest], context: grpc.ServicerContext):
        self._check(context)
        data = b"".join(request.data for request in request_iterator)
        digest = hashlib.sha256(data).hexdigest()
        self.state.models[digest] = data
        return admin_pb2.UploadModelResponse(
            digest="0" * 64 if self.state.damage == "digest" else digest, size_bytes=len(data)
        )

    def CreateJob(self, request: admin_pb2.CreateJobRequest, context: grpc.ServicerContext):
        self._check(context)
        assert request.idempotency_key
        if request.initial_digest not in self.state.models:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the initial model was not uploaded")
        if request.idempotency_key in self.state.by_key:
            return self.state.jobs[self.state.by_key[request.idempotency_key]]
        names = ((plugin.kind, plugin.name) for plugin in self.state.leader.get("plugins", ()))
        spec = parse_job(request.job_file, Plugins(absent=frozenset(names)))
        job = self.state.add_job(spec.name, S.JOB_STATUS_DRAFT)
        job.job_file = request.job_file
        job.num_rounds = spec.rounds
        job.model.digest = request.initial_digest
        self.state.by_key[request.idempotency_key] = job.job_id
        self._answer("CreateJob", context)
        return job

    def ListJobs(self, request: admin_pb2.ListJobsRequest, context: grpc.ServicerContext):
        self._check(context)
        found = [
            job
            for job in self.state.jobs.values()
            if (not request.statuses or job.status in request.statuses)
            and request.population in ("", job.population)
            and any(request.search.lower() in text.lower() for text in (job.name, job.job_id))
            and job.created_unix_s >= request.since_unix_s
        ]
        jobs, token, total = self._page(found, request)
        return admin_pb2.ListJobsResponse(jobs=jobs, next_page_token=token, total=total)

    def ShowJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        return self._find(request.job, context)

    def StartJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        if self.state.refuses_start:
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "not today")
        job = self._change(request.job, S.JOB_STATUS_DRAFT, S.JOB_STATUS_RUNNING, context)
        self._answer("StartJob", context)
        return job

    def PauseJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        return self._change(request.job, S.JOB_STATUS_RUNNING, S.JOB_STATUS_PAUSED, context)

    def ResumeJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        return self._change(request.job, S.JOB_STATUS_PAUSED, S.JOB_STATUS_RUNNING, context)

    def CancelJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        return self._change(request.job, S.JOB_STATUS_RUNNING, S.JOB_STATUS_CANCELLED, context)

    def DeleteJob(self, request: admin_pb2.JobRequest, context: grpc.ServicerContext):
        job = self._find(request.job, context)
        if job.status not in ENDED:
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "cannot delete a job that is RUNNING")
        del self.state.jobs[job.job_id]
        return admin_pb2.DeleteJobResponse(job_id=job.job_id, num_releases=self.state.num_releases)

    def SetJob(self, request: admin_pb2.SetJobRequest, context: grpc.ServicerContext):
        job = self._find(request.job, context)
        self.state.changes += request.changes
        return job

    def RollbackJob(self, request: admin_pb2.RollbackJobRequest, context: grpc.ServicerContext):
        job = self._find(request.job, context)
        job.model.version += 1
        job.restored_from = request.version
        return admin_pb2.RollbackJobResponse(job=job, rule_state="initial")

    def WatchJob(self, request: admin_pb2.WatchJobRequest, context: grpc.ServicerContext):
        job = self._find(request.job, context)
        with self.state.changed:
            self.state.watched_after.append(request.after_sequence)
            self.state.progress_every_s.append(request.progress_every_s)
            self.state.changed.notify_all()
        if self.state.ends_started_jobs:
            job.status = S.JOB_STATUS_COMPLETED

        def wake() -> None:
            self.state.left.set()
            with self.state.changed:
                self.state.changed.notify_all()

        context.add_callback(wake)
        position, limit = 0, self.state.stop_watch_after
        while context.is_active():
            with self.state.changed:
                ends = request.until_now or job.status in ENDED
                while position == len(self.state.events) and not ends and context.is_active():
                    self.state.changed.wait()
                    ends = job.status in ENDED
                fresh = self.state.events[position:]
            if not fresh:
                return
            position += len(fresh)
            for event in fresh[: limit or None]:
                if event.sequence > request.after_sequence:
                    yield event
            if limit:
                return

    def ListRounds(self, request: admin_pb2.ListRoundsRequest, context: grpc.ServicerContext):
        self._find(request.job, context)
        abandoned = admin_pb2.ATTEMPT_PHASE_ABANDONED
        found = [
            one
            for one in self.state.rounds
            if (request.all_attempts or one.phase != abandoned) and request.round in (0, one.round)
        ]
        rounds, token, total = self._page(found, request)
        return admin_pb2.ListRoundsResponse(rounds=rounds, next_page_token=token, total=total)

    def ShowRound(self, request: admin_pb2.ShowRoundRequest, context: grpc.ServicerContext):
        self._find(request.job, context)
        found = [one for (number, _), one in sorted(self.state.details.items()) if number == request.round]
        for one in found if request.attempt else found[-1:]:
            if request.attempt in (0, one.round.attempt):
                return one
        _refuse(context, grpc.StatusCode.NOT_FOUND, f"the job has no such attempt at round {request.round}")

    def ListAssignments(self, request: admin_pb2.ListAssignmentsRequest, context: grpc.ServicerContext):
        self._check(context)
        if request.job:
            job_id = self._find(request.job, context).job_id
        elif request.client_id:
            job_id = ""
        else:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "name a job or a client")
        found = [
            one
            for one in self.state.assignments
            if job_id in ("", one.job_id)
            and request.round in (0, one.round)
            and request.attempt in (0, one.attempt)
            and request.client_id in ("", one.client_id)
            and (not request.states or one.state in request.states)
        ]
        assignments, token, total = self._page(found, request)
        return admin_pb2.ListAssignmentsResponse(assignments=assignments, next_page_token=token, total=total)

    def ListModelVersions(self, request: admin_pb2.ListModelVersionsRequest, context: grpc.ServicerContext):
        self._find(request.job, context)
        versions, token, total = self._page(self.state.versions, request)
        return admin_pb2.ListModelVersionsResponse(versions=versions, next_page_token=token, total=total)

    def ExportModel(self, request: admin_pb2.ExportModelRequest, context: grpc.ServicerContext):
        self._find(request.job, context)
        if self.state.damage == "empty":
            return
        wanted = request.version if request.HasField("version") else self.state.versions[-1].model.version
        found = [v.model for v in self.state.versions if v.model.version == wanted]
        if not found:
            _refuse(context, grpc.StatusCode.NOT_FOUND, f"the job has no version {wanted}")
        yield admin_pb2.ExportModelResponse(model=found[0])
        data = self.state.models[found[0].digest]
        match self.state.damage:
            case "bytes":
                data = data[:-1] + bytes([data[-1] ^ 1])
            case "short":
                data = data[:-1]
            case "long":
                data += b"x"
            case _:
                pass
        for start in range(0, len(data), 2**20):
            yield admin_pb2.ExportModelResponse(data=data[start : start + 2**20])

    def _answer(self, method: str, context: grpc.ServicerContext) -> None:
        if method in self.state.lost_answers:
            self.state.lost_answers.remove(method)
            _refuse(context, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def _find(self, name: str, context: grpc.ServicerContext) -> admin_pb2.Job:
        self._check(context)
        for job in self.state.jobs.values():
            if name in (job.job_id, job.name):
                return job
        _refuse(context, grpc.StatusCode.NOT_FOUND, f"there is no job {name!r}")

    def _change(self, name: str, before: Status, after: Status, context: grpc.ServicerContext) -> admin_pb2.Job:
        job = self._find(name, context)
        if job.status != before:
            text = f"job {job.name!r} is {S.Name(job.status)[11:]}; expected {S.Name(before)[11:]}"
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        job.status = after
        return job


class FakeClients(_Service, admin_pb2_grpc.ClientsServicer):
    def ListClients(self, request: admin_pb2.ListClientsRequest, context: grpc.ServicerContext):
        self._check(context)
        found = [
            client
            for client in self.state.clients
            if request.population in ("", client.population)
            and request.state in ("", client.state)
            and request.labels.items() <= client.labels.items()
            and request.search in client.client_id
        ]
        clients, token, total = self._page(found, request)
        return admin_pb2.ListClientsResponse(clients=clients, next_page_token=token, total=total)

    def ShowClient(self, request: admin_pb2.ShowClientRequest, context: grpc.ServicerContext):
        self._check(context)
        for client in self.state.clients:
            if client.client_id == request.client_id:
                return client
        _refuse(context, grpc.StatusCode.NOT_FOUND, f"there is no client {request.client_id!r}")

    def ShowFleet(self, request: admin_pb2.ShowFleetRequest, context: grpc.ServicerContext):
        self._check(context)
        states = Counter(client.state for client in self.state.clients)
        count = admin_pb2.PopulationCount(
            population="demo",
            num_clients=len(self.state.clients),
            num_waiting=states["waiting"],
            num_busy=states["busy"],
            num_revoked=states["revoked"],
        )
        return admin_pb2.ShowFleetResponse(populations=[count])

    def RevokeClient(self, request: admin_pb2.RevokeClientRequest, context: grpc.ServicerContext):
        self._check(context)
        return admin_pb2.Client(client_id=request.client_id, state="revoked", enrollment_id="e-1")

    def CreateEnrollment(self, request: admin_pb2.CreateEnrollmentRequest, context: grpc.ServicerContext):
        self._check(context)
        self.state.asked = request
        made = admin_pb2.Enrollment(
            enrollment_id="e-1",
            population=request.population,
            num_uses=request.num_uses,
            num_left=request.num_uses,
            created_unix_s=T0,
            expires_unix_s=T0 + request.expires_s,
            state="open",
        )
        self.state.enrollments.append(made)
        return admin_pb2.CreateEnrollmentResponse(enrollment=made, ticket="fpt1.secret")

    def ListEnrollments(self, request: admin_pb2.ListEnrollmentsRequest, context: grpc.ServicerContext):
        self._check(context)
        enrollments, token, total = self._page(self.state.enrollments, request)
        return admin_pb2.ListEnrollmentsResponse(enrollments=enrollments, next_page_token=token, total=total)

    def RevokeEnrollment(self, request: admin_pb2.RevokeEnrollmentRequest, context: grpc.ServicerContext):
        self._check(context)
        answer = admin_pb2.Enrollment(enrollment_id=request.enrollment_id, state="revoked")
        if request.with_clients:  # pages of one client
            self.state.pages.append(request.page_token)
            answer.num_revoked_clients = 1
            answer.next_page_token = str(len(self.state.pages)) if len(self.state.pages) < 3 else ""
        return answer


class FakeOperators(_Service, admin_pb2_grpc.OperatorsServicer):
    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext):
        self._check(context)
        return admin_pb2.GetStatusResponse(
            software_version="0.1.0",
            protocol_version=1,
            uptime_s=3725.0,
            peak_rss_bytes=200 * 2**20,
            num_clients=12,
            num_waiting=9,
            num_busy=3,
            num_jobs={"RUNNING": 2, "DRAFT": 1},
            process_id=4711,
            evaluators=["digits"],
            **self.state.leader,
            insecure=self.state.insecure,
            certificate_expires_unix_s=T0,
            certificate_days_left=30.4,
            disk_free_bytes=2 * 2**30,
            disk_total_bytes=8 * 2**30,
            database="sqlite",
            alerts=self.state.alerts,
            num_alerts=len(self.state.alerts),
        )

    def AddOperator(self, request: admin_pb2.AddOperatorRequest, context: grpc.ServicerContext):
        self._check(context)
        made = admin_pb2.Operator(
            name=request.name, role=request.role, created_unix_s=T0, expires_unix_s=request.expires_in_s
        )
        self.state.operators.append(made)
        return admin_pb2.AddOperatorResponse(operator=made, token=f"token of {request.name}")

    def ListOperators(self, request: admin_pb2.ListOperatorsRequest, context: grpc.ServicerContext):
        self._check(context)
        operators, token, _ = self._page(self.state.operators, request)
        return admin_pb2.ListOperatorsResponse(operators=operators, next_page_token=token)

    def RemoveOperator(self, request: admin_pb2.RemoveOperatorRequest, context: grpc.ServicerContext):
        self._check(context)
        self.state.operators = [one for one in self.state.operators if one.name != request.name]
        return admin_pb2.RemoveOperatorResponse()

    def ListAudit(self, request: admin_pb2.ListAuditRequest, context: grpc.ServicerContext):
        self._check(context)
        if request.newest_first and request.after_sequence:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "newest_first: expected after_sequence = 0")
        found = [
            event
            for event in self.state.audit
            if event.sequence > request.after_sequence
            and request.actor in ("", event.actor)
            and request.action in ("", event.action)
            and event.unix_s >= request.since_unix_s
        ]
        events, token, total = self._page(found, request)
        return admin_pb2.ListAuditResponse(events=events, next_page_token=token, total=total)


class FakePrivacy(_Service, admin_pb2_grpc.PrivacyServicer):
    def ShowPrivacy(self, request: admin_pb2.ShowPrivacyRequest, context: grpc.ServicerContext):
        self._check(context)
        return self.state.privacy

    def SetPrivacyBudget(self, request: admin_pb2.SetPrivacyBudgetRequest, context: grpc.ServicerContext):
        self._check(context)
        self.state.budgets[request.population] = (request.epsilon, request.delta)
        cost = admin_pb2.PrivacyCost(releases=4, epsilon=0.25, epsilon_rdp=0.5)
        return admin_pb2.PopulationPrivacy(
            population=request.population, epsilon=request.epsilon, delta=request.delta, committed=cost, num_private=2
        )

    def RemovePrivacyBudget(self, request: admin_pb2.RemovePrivacyBudgetRequest, context: grpc.ServicerContext):
        self._check(context)
        del self.state.budgets[request.population]
        return admin_pb2.RemovePrivacyBudgetResponse()


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort raises")


class FakeServer:
    """A server of a state; `restart` kills it and starts another on the same port. `tls`: its key and certificate."""

    def __init__(self, state: State, tls: tuple[bytes, bytes] | None = None, port: int = 0) -> None:
        self.state = state
        self._tls = tls
        self.port = port
        self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        admin_pb2_grpc.add_JobsServicer_to_server(FakeJobs(self.state), self._server)
        admin_pb2_grpc.add_ClientsServicer_to_server(FakeClients(self.state), self._server)
        admin_pb2_grpc.add_OperatorsServicer_to_server(FakeOperators(self.state), self._server)
        admin_pb2_grpc.add_PrivacyServicer_to_server(FakePrivacy(self.state), self._server)
        address = f"127.0.0.1:{self.port}"
        if self._tls is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([self._tls]))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def restart(self) -> None:
        self.stop()
        self._start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
