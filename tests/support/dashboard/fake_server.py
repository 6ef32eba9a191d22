"""A server for the pages without a network: its messages are attributes that tests set, and its calls are noted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from fedplat.errors import ServerRefusedError, ServerUnreachableError
from fedplat.wire.v1 import admin_pb2, events_pb2, model_pb2

T0 = 1_790_000_000.0
JOB_ID = "a" * 32
CLIENT_ID = "c-0123456789abcdef"
ENROLLMENT_ID = "e-0123456789"


class Refusal(grpc.RpcError, grpc.Call):
    """A status of gRPC, as `AdminClient` would have translated it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return ""

    def initial_metadata(self) -> Any:
        return ()

    def trailing_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def refused(code: grpc.StatusCode, text: str = "the server says no") -> ServerRefusedError:
    error = ServerRefusedError(text)
    error.__cause__ = Refusal(code)
    return error


class FakeWatch:
    """Changes that a test makes."""

    def __init__(self) -> None:
        self._changed = threading.Semaphore(0)
        self.is_closed = False

    def change(self) -> None:
        self._changed.release()

    def changes(self) -> Iterator[object]:
        while True:
            self._changed.acquire()
            if self.is_closed:
                return
            yield None

    def close(self) -> None:
        self.is_closed = True
        self._changed.release()


class FakeServer:
    """The source of the pages. `error` is raised by every call; `calls` are the names of those that were made."""

    is_simulation = False
    home = "/"
    name = "fed.example.org:7443"

    def __init__(self, role: str = "admin") -> None:
        self.role = role
        self.error: Exception | None = None
        self.calls: list[str] = []
        self.watches: list[FakeWatch] = []
        self.is_closed = False
        self.jobs = [make_job()]
        self.rounds = make_rounds(12)
        self.private = False
        self.num_clients = 3
        self.optional_error: Exception | None = None

    def _answer(self, call: str, message: Any) -> Any:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return message

    def status(self) -> admin_pb2.GetStatusResponse:
        status = admin_pb2.GetStatusResponse(
            software_version="0.1.0",
            uptime_s=7265.0,
            num_clients=self.num_clients,
            num_waiting=1,
            num_busy=2,
            num_jobs={"RUNNING": 1},
            certificate_days_left=12.0,
            certificate_expires_unix_s=T0,
            disk_free_bytes=2**30,
            disk_total_bytes=2**34,
            database="sqlite",
            operator="ada",
            role=self.role,
            num_alerts=1,
        )
        status.alerts.add(
            name="certificate_expiring",
            severity=admin_pb2.ALERT_SEVERITY_WARNING,
            text="The server's certificate expires in 12 days.",
            remedy="Renew it: fedplat-server certificates renew.",
        )
        return self._answer("status", status)

    def page(self, request: Any) -> Any:
        """One page of a list, as `AdminClient.page`."""
        lists: dict[type, Callable[[Any], Any]] = {
            admin_pb2.ListJobsRequest: self._list_jobs,
            admin_pb2.ListRoundsRequest: self._list_rounds,
            admin_pb2.ListAssignmentsRequest: self._list_assignments,
            admin_pb2.ListClientsRequest: self._list_clients,
            admin_pb2.ListAuditRequest: self._list_audit,
            admin_pb2.ListEnrollmentsRequest: self._list_enrollments,
            events_pb2.ListEventsRequest: self._list_events,
            events_pb2.ListWebhooksRequest: self._list_webhooks,
            events_pb2.ListDeliveriesRequest: self._list_deliveries,
        }
        return lists[type(request)](request)

    def _list_jobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        chosen = [job for job in self.jobs if not request.statuses or job.status in request.statuses]
        chosen = [job for job in chosen if request.search in job.name]
        rows, token = page_of(chosen, request)
        response = admin_pb2.ListJobsResponse(jobs=rows, total=len(chosen), next_page_token=token)
        response.num_by_status["RUNNING"] = len(self.jobs)
        return self._answer("list_jobs", response)

    def show_job(self, job: str) -> admin_pb2.Job:
        found = [each for each in self.jobs if job in (each.job_id, each.name)]
        if not found:
            raise refused(grpc.StatusCode.NOT_FOUND, "there is no such job")
        return self._answer("show_job", found[0])

    def _list_rounds(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse:
        total = len(self.rounds)
        if request.num_samples:
            step = max(1, -(-total // request.num_samples))
            return self._answer("list_rounds", admin_pb2.ListRoundsResponse(rounds=self.rounds[::step], total=total))
        rows, token = page_of(self.rounds[::-1] if request.newest_first else self.rounds, request)
        return self._answer(
            "list_rounds", admin_pb2.ListRoundsResponse(rounds=rows, total=total, next_page_token=token)
        )

    def show_round(self, job: str, round_: int, attempt: int = 0) -> admin_pb2.RoundDetails:
        found = [each for each in self.rounds if each.round == round_]
        if not found:
            raise refused(grpc.StatusCode.NOT_FOUND, "there is no such round")
        details = admin_pb2.RoundDetails(round=found[-1], num_attempts=2)
        details.reasons.add(
            state="FAILED",
            reason="TRAINER_ERROR",
            count=2,
            text="The trainer raised an exception.",
            example="<b>oops</b>",
        )
        details.labels.add(name="region", value="eu", assigned=8, reported=7, merged=3)
        return self._answer("show_round", details)

    def _list_assignments(self, request: admin_pb2.ListAssignmentsRequest) -> admin_pb2.ListAssignmentsResponse:
        rows = [make_assignment(number) for number in range(min(request.page_size, 40))]
        return self._answer("list_assignments", admin_pb2.ListAssignmentsResponse(assignments=rows, total=len(rows)))

    def list_latest_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
        model = model_pb2.ModelRef(version=3, digest="d" * 64, size_bytes=1000)
        return self._answer("list_versions", [admin_pb2.ModelVersion(model=model, round=3, created_unix_s=T0)] * limit)

    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        response = admin_pb2.ShowPrivacyResponse()
        for each in self.jobs[:1]:
            row = response.jobs.add(
                job_id=each.job_id, name=each.name, is_private=self.private, delta=1e-6, epsilon=8.0
            )
            row.released.epsilon, row.planned.epsilon = 2.5, 6.0
        response.populations.add(population="demo", epsilon=10.0, delta=1e-6, num_private=1)
        return self._answer("show_privacy", response)

    def watch(self, job: str) -> FakeWatch:
        self.watches.append(FakeWatch())
        return self.watches[-1]

    def close(self) -> None:
        self.is_closed = True

    def show_fleet(self, population: str, since_unix_s: float) -> admin_pb2.ShowFleetResponse:
        fleet = admin_pb2.ShowFleetResponse()
        fleet.populations.add(population="demo", num_clients=self.num_clients, num_waiting=1, num_busy=2)
        for number in range(168):
            fleet.hours.add(population="demo", hour_unix_s=T0 + 3600 * number, num_seen=number % 24)
        for number in range(20):
            fleet.labels.add(name="region", value=f"r{number}", count=number)
        fleet.versions.add(value="0.1.0", count=3)
        return self._answer("show_fleet", fleet)

    def _list_clients(self, request: admin_pb2.ListClientsRequest) -> admin_pb2.ListClientsResponse:
        size = min(request.page_size, self.num_clients)
        rows = [make_client(f"c-{number:016x}") for number in range(size)]
        return self._answer(
            "list_clients",
            admin_pb2.ListClientsResponse(
                clients=rows, total=self.num_clients, next_page_token="x" if self.num_clients > size else ""
            ),
        )

    def show_client(self, client_id: str) -> admin_pb2.Client:
        return self._answer("show_client", make_client(client_id))

    def _list_audit(self, request: admin_pb2.ListAuditRequest) -> admin_pb2.ListAuditResponse:
        response = admin_pb2.ListAuditResponse(total=request.page_size)
        for number in range(request.page_size):
            response.events.add(sequence=number + 1, unix_s=T0, actor="ada", action="job.started", subject="j" * 32)
        return self._answer("list_audit", response)

    def _list_enrollments(self, request: admin_pb2.ListEnrollmentsRequest) -> admin_pb2.ListEnrollmentsResponse:
        response = admin_pb2.ListEnrollmentsResponse(total=1)
        response.enrollments.add(enrollment_id=ENROLLMENT_ID, population="demo", num_uses=2, num_left=1, state="open")
        return self._answer("list_enrollments", response)

    def list_operators(self) -> Sequence[admin_pb2.Operator]:
        return self._answer("list_operators", [admin_pb2.Operator(name="ada", role="admin", created_unix_s=T0)])

    def _optional(self, call: str, message: Any) -> Any:
        if self.optional_error is not None:
            raise self.optional_error
        return self._answer(call, message)

    def _list_events(self, request: events_pb2.ListEventsRequest) -> events_pb2.ListEventsResponse:
        response = events_pb2.ListEventsResponse()
        for number in range(request.page_size):
            response.events.add(
                sequence=number + 1, unix_s=T0, type="round.committed", job_id=JOB_ID, job_name="digits", round=3
            )
        return self._optional("list_events", response)

    def _list_webhooks(self, request: events_pb2.ListWebhooksRequest) -> events_pb2.ListWebhooksResponse:
        response = events_pb2.ListWebhooksResponse()
        response.webhooks.add(webhook_id="w-1", url="https://example.org/hook", num_pending=2, last_result="503")
        return self._optional("list_webhooks", response)

    def _list_deliveries(self, request: events_pb2.ListDeliveriesRequest) -> events_pb2.ListDeliveriesResponse:
        response = events_pb2.ListDeliveriesResponse()
        event = events_pb2.Event(sequence=1, type="job.failed")
        for _ in range(request.page_size):
            response.deliveries.add(webhook_id="w-1", event=event, state="pending", num_attempts=3, result="503")
        return self._optional("list_deliveries", response)

    def change_job(self, job: str, action: str) -> None:
        self._act(f"{action} {job}")

    def rollback(self, job: str, version: int) -> None:
        self._act(f"rollback {job} {version}")

    def revoke_client(self, client_id: str) -> None:
        self._act(f"revoke {client_id}")

    def revoke_enrollment(self, enrollment_id: str) -> None:
        self._act(f"revoke {enrollment_id}")

    def _act(self, call: str) -> None:
        if self.role == "viewer":
            raise refused(grpc.StatusCode.PERMISSION_DENIED, "the call needs the role operator")
        self._answer(call, None)


def page_of(rows: Sequence[Any], request: Any) -> tuple[Sequence[Any], str]:
    """One page of rows, and the token of the next one."""
    start = int(request.page_token or 0)
    end = start + request.page_size
    return rows[start:end], str(end) if end < len(rows) else ""


def make_job(number: int = 0, status: admin_pb2.JobStatus.ValueType = admin_pb2.JOB_STATUS_RUNNING) -> admin_pb2.Job:
    job = admin_pb2.Job(
        job_id=JOB_ID if number == 0 else f"{number:032x}",
        name="digits" if number == 0 else f"digits-{number}",
        population="demo",
        status=status,
        round=12,
        num_rounds=20,
        created_unix_s=T0,
        job_file='name = "digits"\n',
    )
    job.model.version = 12
    job.current.CopyFrom(
        admin_pb2.Round(round=13, attempt=1, phase=admin_pb2.ATTEMPT_PHASE_COLLECTING, goal=10, assigned=13, reported=4)
    )
    return job


def make_rounds(count: int) -> list[admin_pb2.Round]:
    """Committed rounds of a job that learns."""
    return [
        admin_pb2.Round(
            round=number,
            attempt=1,
            kind=admin_pb2.ATTEMPT_KIND_TRAIN,
            phase=admin_pb2.ATTEMPT_PHASE_COMMITTED,
            goal=10,
            minimum=8,
            checked_in=40,
            eligible=30,
            assigned=13,
            downloaded=13,
            trained=11,
            reported=10,
            merged=10,
            late=2,
            failed=1,
            opened_unix_s=T0 + 60 * number,
            seconds=50.0 + number % 7,
            update_bytes=10 * 2**20,
            client_metrics={"loss": 2.0 / number},
            server_metrics={"accuracy": 1.0 - 0.9 / number},
        )
        for number in range(1, count + 1)
    ]


def make_assignment(number: int) -> admin_pb2.AssignmentDetails:
    return admin_pb2.AssignmentDetails(
        job_id=JOB_ID,
        job_name="digits",
        round=3,
        attempt=1,
        client_id=f"c-{number:016x}",
        state="FAILED" if number % 5 == 0 else "MERGED",
        reason="TRAINER_ERROR" if number % 5 == 0 else "",
        text="<script>alert(1)</script>" if number == 0 else "",
        assigned_unix_s=T0 + 180,
        downloaded_unix_s=T0 + 181,
        uploading_unix_s=T0 + 200,
        ended_unix_s=T0 + 202,
        update_bytes=2**20,
        num_examples=100.0,
    )


def make_client(client_id: str) -> admin_pb2.Client:
    return admin_pb2.Client(
        client_id=client_id,
        population="demo",
        labels={"region": "eu", "note": "<i>\x1b[2J</i>"},
        state="waiting",
        enrolled_unix_s=T0,
        last_seen_unix_s=T0,
        software_version="0.1.0",
    )


def away() -> ServerUnreachableError:
    return ServerUnreachableError("no fedplat server answers at fed.example.org:7443 (connection refused)")
