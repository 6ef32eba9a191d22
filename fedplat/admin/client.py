"""`AdminClient`: the services for operators (`admin.proto` and `events.proto`) of a server, as methods."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from fedplat import durable, errors
from fedplat.admin import connection, submission
from fedplat.admin.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.admin.profile import Profile
from fedplat.admin.submission import ProgressCallback
from fedplat.job import JobSpec, build_rule, job_file
from fedplat.model import Parameters
from fedplat.procedures import ProcedureResult
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, events_pb2, events_pb2_grpc, model_pb2

_PAUSE_S = 0.1


class AdminClient:
    """A client of the server of a profile, with TLS unless the profile is `insecure`.

    Every method raises `ServerUnreachableError` if no server answers, and `ServerRefusedError` with the server's reason
    if it refuses the call. `job` is a job's id, or a name that only one job has. The deadline of a call is `timeout_s`
    seconds; that of a model transfer is `transfer_s`. The connection is opened by the first call. Raises `ValueError`
    if the profile's server is not `host:port`.
    """

    def __init__(self, profile: Profile, *, timeout_s: float = 30.0, transfer_s: float = 3600.0) -> None:
        self._connection = connection.AdminConnection(profile, timeout_s)
        self.profile = profile
        self.server = profile.server
        self._transfer_s = transfer_s
        channel = self._connection.channel
        self._jobs = admin_pb2_grpc.JobsStub(channel)
        self._clients = admin_pb2_grpc.ClientsStub(channel)
        self._operators = admin_pb2_grpc.OperatorsStub(channel)
        self._privacy = admin_pb2_grpc.PrivacyStub(channel)
        self._events = events_pb2_grpc.EventsStub(channel)
        self._webhooks = events_pb2_grpc.WebhooksStub(channel)
        self._lists: dict[type, Callable[..., Any]] = {
            admin_pb2.ListJobsRequest: self._jobs.ListJobs,
            admin_pb2.ListRoundsRequest: self._jobs.ListRounds,
            admin_pb2.ListAssignmentsRequest: self._jobs.ListAssignments,
            admin_pb2.ListModelVersionsRequest: self._jobs.ListModelVersions,
            admin_pb2.ListClientsRequest: self._clients.ListClients,
            admin_pb2.ListEnrollmentsRequest: self._clients.ListEnrollments,
            admin_pb2.ListAuditRequest: self._operators.ListAudit,
            events_pb2.ListEventsRequest: self._events.ListEvents,
            events_pb2.ListWebhooksRequest: self._webhooks.ListWebhooks,
            events_pb2.ListDeliveriesRequest: self._webhooks.ListDeliveries,
        }

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; pending calls are cancelled."""
        self._connection.close()

    def wait_until_ready(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Return the server's status as soon as it answers. Raises `ServerUnreachableError` after `timeout_s`."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            try:
                # Not grpc.channel_ready_future: its polling thread fails with a traceback when the channel is closed.
                with self._connection.translate_errors(timeout_s):
                    request, metadata = admin_pb2.GetStatusRequest(), self._connection.metadata
                    return self._operators.GetStatus(request, timeout=left_s, wait_for_ready=True, metadata=metadata)
            except errors.ServerUnreachableError:  # a connection may also break right after it was opened
                if time.monotonic() + _PAUSE_S >= end:
                    raise
            time.sleep(_PAUSE_S)
            left_s = None if timeout_s is None else end - time.monotonic()

    def status(self, timeout_s: float | None = None) -> admin_pb2.GetStatusResponse:
        """Return the server's status, within `timeout_s` instead of the client's usual time."""
        return self._connection.call(self._operators.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)

    @overload
    def page(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListAssignmentsRequest) -> admin_pb2.ListAssignmentsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListModelVersionsRequest) -> admin_pb2.ListModelVersionsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListClientsRequest) -> admin_pb2.ListClientsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListEnrollmentsRequest) -> admin_pb2.ListEnrollmentsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListAuditRequest) -> admin_pb2.ListAuditResponse: ...
    @overload
    def page(self, request: events_pb2.ListEventsRequest) -> events_pb2.ListEventsResponse: ...
    @overload
    def page(self, request: events_pb2.ListWebhooksRequest) -> events_pb2.ListWebhooksResponse: ...
    @overload
    def page(self, request: events_pb2.ListDeliveriesRequest) -> events_pb2.ListDeliveriesResponse: ...
    def page(self, request: Any) -> Any:
        """Return one page of the list that the request is for, with the number of rows on all pages, if it has that.

        `iter_jobs` and the other methods `iter_...` yield the rows of all pages.
        """
        return self._connection.call(self._lists[type(request)], request)

    def upload_model(self, chunks: Iterable[bytes]) -> admin_pb2.UploadModelResponse:
        """Upload a safetensors file in chunks of at most `wire.CHUNK_BYTES`, and check the digest that was stored."""
        model = submission.OutgoingModel(chunks)
        with self._connection.translate_errors(self._transfer_s):
            response = self._jobs.UploadModel(
                model.requests(), timeout=self._transfer_s, metadata=self._connection.metadata
            )
        model.check(response)
        return response

    def create_job(self, job_file: str, initial_digest: str, idempotency_key: str) -> admin_pb2.Job:
        """Create a job, status DRAFT, from the text of a job file; for a known key, return the job that has it."""
        request = admin_pb2.CreateJobRequest(
            job_file=job_file, initial_digest=initial_digest, idempotency_key=idempotency_key
        )
        return self._connection.call(self._jobs.CreateJob, request)

    def submit_job(
        self, job: JobSpec, initial: Parameters, idempotency_key: str = "", *, wait_s: float = DEFAULT_TIMEOUT_S
    ) -> admin_pb2.Job:
        """Upload the initial model of a job that was made from objects, create the job and start it.

        With the same `idempotency_key` a repeated call returns the same job. While the server cannot be reached, it
        tries again for `wait_s`, and creates one job even if a reply was lost. Raises `JobFileError` for a job that no
        file can describe.
        """
        text = job_file(job)
        wanted = submission.Submission(text, job, build_rule(job).requirements.extend(initial))
        patience = Patience(wait_s, lambda text: None)
        return submission.submit(self, wanted, idempotency_key=idempotency_key, patience=patience)

    def list_jobs(self) -> Sequence[admin_pb2.Job]:
        """Return all jobs, without their job files; `show_job` returns one with it."""
        return list(self.iter_jobs())

    def iter_jobs(
        self,
        limit: int | None = None,
        *,
        statuses: Iterable[admin_pb2.JobStatus.ValueType] = (),
        population: str = "",
        search: str = "",
        since_unix_s: float = 0.0,
        newest_first: bool = False,
    ) -> Iterator[admin_pb2.Job]:
        """Yield jobs in the order of their creation, at most `limit`, with one page in memory at a time.

        Only those with one of the `statuses`, of a population, with a text in their name or id, and created since a
        time.
        """
        request = admin_pb2.ListJobsRequest(
            statuses=statuses,
            population=population,
            search=search,
            since_unix_s=since_unix_s,
            newest_first=newest_first,
        )
        return self._connection.rows(self._jobs.ListJobs, request, lambda page: page.jobs, limit)

    def show_job(self, job: str) -> admin_pb2.Job:
        """Return a job with its job file."""
        return self._connection.call(self._jobs.ShowJob, admin_pb2.JobRequest(job=job))

    def start(self, job: str) -> admin_pb2.Job:
        """Start a job: DRAFT becomes RUNNING."""
        return self._connection.call(self._jobs.StartJob, admin_pb2.JobRequest(job=job))

    def pause(self, job: str) -> admin_pb2.Job:
        """Pause a job: RUNNING becomes PAUSED."""
        return self._connection.call(self._jobs.PauseJob, admin_pb2.JobRequest(job=job))

    def resume(self, job: str) -> admin_pb2.Job:
        """Resume a job: PAUSED becomes RUNNING."""
        return self._connection.call(self._jobs.ResumeJob, admin_pb2.JobRequest(job=job))

    def cancel(self, job: str) -> admin_pb2.Job:
        """Cancel a job for good: it becomes CANCELLED."""
        return self._connection.call(self._jobs.CancelJob, admin_pb2.JobRequest(job=job))

    def delete(self, job: str) -> admin_pb2.DeleteJobResponse:
        """Delete a job that has ended, with its models."""
        return self._connection.call(self._jobs.DeleteJob, admin_pb2.JobRequest(job=job))

    def set_job(self, job: str, changes: Sequence[str]) -> admin_pb2.Job:
        """Change options of `[retention]` and `[retry]` of a job that has not ended: `["retention.versions=5"]`."""
        return self._connection.call(self._jobs.SetJob, admin_pb2.SetJobRequest(job=job, changes=changes))

    def rollback(self, job: str, version: int) -> admin_pb2.RollbackJobResponse:
        """Make a job continue from an older version."""
        return self._connection.call(self._jobs.RollbackJob, admin_pb2.RollbackJobRequest(job=job, version=version))

    def watch_job(
        self,
        job: str,
        after_sequence: int = 0,
        progress_every_s: float = 0.0,
        *,
        until_now: bool = False,
        only_new: bool = False,
    ) -> Generator[admin_pb2.JobEvent]:
        """Yield the events of a job after a sequence number, past ones first, until the job has ended.

        With `until_now` only those that are stored already; with `only_new` only later ones, and then `after_sequence`
        is 0.

        With `progress_every_s` it also yields progress events of the open attempt, at most one per that many seconds.
        Close the generator to stop earlier. If the server stops, it ends as well, or raises `ServerUnreachableError`;
        `fedplat.cli.watch.follow` retries in this case.
        """
        request = admin_pb2.WatchJobRequest(
            job=job,
            after_sequence=after_sequence,
            progress_every_s=progress_every_s,
            until_now=until_now,
            only_new=only_new,
        )
        call = self._connection.stream(self._jobs.WatchJob, request)
        try:
            with self._connection.translate_errors(None):
                yield from call
        finally:
            call.cancel()

    def list_rounds(self, job: str, *, all_attempts: bool = False) -> Sequence[admin_pb2.Round]:
        """Return the attempts of a job that are committed or open; with `all_attempts` the abandoned ones too."""
        return list(self.iter_rounds(job, all_attempts=all_attempts))

    def iter_rounds(
        self,
        job: str,
        limit: int | None = None,
        *,
        all_attempts: bool = False,
        round_: int = 0,
        newest_first: bool = False,
    ) -> Iterator[admin_pb2.Round]:
        """Yield the attempts of `list_rounds`, at most `limit`, with one page in memory at a time.

        With `round_` only those at this round.
        """
        request = admin_pb2.ListRoundsRequest(
            job=job, all_attempts=all_attempts, round=round_, newest_first=newest_first
        )
        return self._connection.rows(self._jobs.ListRounds, request, lambda page: page.rounds, limit)

    def show_round(self, job: str, round_: int, attempt: int = 0) -> admin_pb2.RoundDetails:
        """Return an attempt (0: the last one at the round) with the reasons and labels of its assignments."""
        request = admin_pb2.ShowRoundRequest(job=job, round=round_, attempt=attempt)
        return self._connection.call(self._jobs.ShowRound, request)

    def iter_assignments(
        self,
        limit: int | None = None,
        *,
        job: str = "",
        round_: int = 0,
        attempt: int = 0,
        client_id: str = "",
        states: Iterable[str] = (),
    ) -> Iterator[admin_pb2.AssignmentDetails]:
        """Yield the assignments of a job or of a client, the latest first, at most `limit`.

        Only those of a round, of an attempt, and in one of the `states`, such as "FAILED".
        """
        request = admin_pb2.ListAssignmentsRequest(
            job=job, round=round_, attempt=attempt, client_id=client_id, states=states
        )
        return self._connection.rows(self._jobs.ListAssignments, request, lambda page: page.assignments, limit)

    def list_clients(self, population: str = "") -> Sequence[admin_pb2.Client]:
        """Return the enrolled clients of one population, or of all."""
        return list(self.iter_clients(population))

    def iter_clients(
        self,
        population: str = "",
        limit: int | None = None,
        *,
        state: str = "",
        labels: Mapping[str, str] | None = None,
        search: str = "",
    ) -> Iterator[admin_pb2.Client]:
        """Yield the clients of `list_clients`, at most `limit`, with one page in memory at a time.

        Only those in a state ("waiting", "busy", "away" or "revoked"), with all of the `labels`, and with a text in
        their id.
        """
        request = admin_pb2.ListClientsRequest(population=population, state=state, labels=labels, search=search)
        return self._connection.rows(self._clients.ListClients, request, lambda page: page.clients, limit)

    def show_client(self, client_id: str) -> admin_pb2.Client:
        """Return a client."""
        return self._connection.call(self._clients.ShowClient, admin_pb2.ShowClientRequest(client_id=client_id))

    def show_fleet(self, population: str = "", since_unix_s: float = 0.0) -> admin_pb2.ShowFleetResponse:
        """Return the numbers of clients by state, label and version, and their availability by hour since a time.

        Of one population, or of all; without a time, of the last 7 days.
        """
        request = admin_pb2.ShowFleetRequest(population=population, since_unix_s=since_unix_s)
        return self._connection.call(self._clients.ShowFleet, request)

    def revoke_client(self, client_id: str) -> admin_pb2.Client:
        """Revoke a client for good."""
        return self._connection.call(self._clients.RevokeClient, admin_pb2.RevokeClientRequest(client_id=client_id))

    def create_enrollment(
        self, population: str, num_uses: int, expires_s: float, address: str
    ) -> admin_pb2.CreateEnrollmentResponse:
        """Create an enrollment token, and a ticket with the token and the `address` that clients connect to."""
        request = admin_pb2.CreateEnrollmentRequest(
            population=population, num_uses=num_uses, expires_s=expires_s, address=address
        )
        return self._connection.call(self._clients.CreateEnrollment, request)

    def list_enrollments(self) -> Sequence[admin_pb2.Enrollment]:
        """Return the enrollment tokens, valid or not, without their secrets."""
        return list(self.iter_enrollments())

    def iter_enrollments(self, limit: int | None = None) -> Iterator[admin_pb2.Enrollment]:
        """Yield the tokens of `list_enrollments`, at most `limit`, with one page in memory at a time."""
        request = admin_pb2.ListEnrollmentsRequest()
        return self._connection.rows(self._clients.ListEnrollments, request, lambda page: page.enrollments, limit)

    def revoke_enrollment(self, enrollment_id: str, *, with_clients: bool = False) -> admin_pb2.Enrollment:
        """Revoke an enrollment token; `with_clients` also revokes the clients that have enrolled with it."""
        request = admin_pb2.RevokeEnrollmentRequest(enrollment_id=enrollment_id, with_clients=with_clients)
        num_revoked = 0
        while True:
            response = self._connection.call(self._clients.RevokeEnrollment, request)
            num_revoked += response.num_revoked_clients
            request.page_token = response.next_page_token
            if not request.page_token:
                response.num_revoked_clients = num_revoked
                return response

    def list_versions(self, job: str) -> Sequence[admin_pb2.ModelVersion]:
        """Return the model versions of a job."""
        return list(self.iter_versions(job))

    def iter_versions(
        self, job: str, limit: int | None = None, *, first_version: int = 0
    ) -> Iterator[admin_pb2.ModelVersion]:
        """Yield versions from `first_version` on, at most `limit`, with one page in memory at a time."""
        request = admin_pb2.ListModelVersionsRequest(job=job, first_version=first_version)
        return self._connection.rows(self._jobs.ListModelVersions, request, lambda page: page.versions, limit)

    def export_model(
        self, job: str, version: int | None, path: str | os.PathLike[str], progress: ProgressCallback | None = None
    ) -> model_pb2.ModelRef:
        """Write a version (None: the latest) to a safetensors file that only its owner can read, in one atomic step.

        Raises `ModelError` if the received bytes are not those of the version, and `OSError` if they cannot be written.
        """
        request = admin_pb2.ExportModelRequest(job=job)
        if version is not None:
            request.version = version
        # A model may reveal its training data: only the owner may read it, whatever the umask.
        with durable.atomic_write(Path(path), 0o600) as file:
            call = self._connection.stream(self._jobs.ExportModel, request, self._transfer_s)
            try:
                with self._connection.translate_errors(self._transfer_s):
                    return submission.receive_model(call, file, progress)
            finally:
                call.cancel()

    def result(self, job: str) -> ProcedureResult:
        """Return the result of a job with a procedure. Raises `ProcedureError` if it has none yet, and `ModelError`."""
        return submission.download_result(self, job)

    def add_operator(self, name: str, role: str, expires_in_s: float = 0.0) -> admin_pb2.AddOperatorResponse:
        """Add an operator. Only this response has its token, which never expires if `expires_in_s` is 0."""
        request = admin_pb2.AddOperatorRequest(name=name, role=role, expires_in_s=expires_in_s)
        return self._connection.call(self._operators.AddOperator, request)

    def list_operators(self) -> Sequence[admin_pb2.Operator]:
        """Return all operators."""
        request = admin_pb2.ListOperatorsRequest()
        return list(self._connection.rows(self._operators.ListOperators, request, lambda page: page.operators, None))

    def remove_operator(self, name: str) -> None:
        """Remove an operator: its next call is refused."""
        self._connection.call(self._operators.RemoveOperator, admin_pb2.RemoveOperatorRequest(name=name))

    def iter_audit(
        self,
        after_sequence: int = 0,
        limit: int | None = None,
        *,
        actor: str = "",
        action: str = "",
        since_unix_s: float = 0.0,
        newest_first: bool = False,
    ) -> Iterator[admin_pb2.AuditEvent]:
        """Yield rows of the audit log after a sequence number, at most `limit`, with one page in memory at a time.

        Only those of an actor, with an action, and since a time. With `newest_first`, `after_sequence` must be 0.
        """
        request = admin_pb2.ListAuditRequest(
            after_sequence=after_sequence,
            actor=actor,
            action=action,
            since_unix_s=since_unix_s,
            newest_first=newest_first,
        )
        return self._connection.rows(self._operators.ListAudit, request, lambda page: page.events, limit)

    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        """Return the releases of a job so far and at most, with their costs; without a name, of all private jobs."""
        merged = admin_pb2.ShowPrivacyResponse()
        request = admin_pb2.ShowPrivacyRequest(job=job)
        for page in self._connection.pages(self._privacy.ShowPrivacy, request):
            merged.MergeFrom(page)
        merged.ClearField("next_page_token")
        return merged

    def set_privacy_budget(self, population: str, epsilon: float, delta: float) -> admin_pb2.PopulationPrivacy:
        """Bound the total cost of all private jobs of a population."""
        request = admin_pb2.SetPrivacyBudgetRequest(population=population, epsilon=epsilon, delta=delta)
        return self._connection.call(self._privacy.SetPrivacyBudget, request)

    def remove_privacy_budget(self, population: str) -> None:
        """Remove a population's budget."""
        request = admin_pb2.RemovePrivacyBudgetRequest(population=population)
        self._connection.call(self._privacy.RemovePrivacyBudget, request)

    def iter_events(
        self, limit: int | None = None, *, types: Sequence[str] = (), job: str = "", newest_first: bool = False
    ) -> Iterator[events_pb2.Event]:
        """Yield the stored events, at most `limit`, with one page in memory at a time.

        Only those of some types (empty: all), and of one job (empty: of all).
        """
        request = events_pb2.ListEventsRequest(types=types, job=job, newest_first=newest_first)
        return self._connection.rows(self._events.ListEvents, request, lambda page: page.events, limit)

    def watch_events(
        self, after_sequence: int | None = None, *, types: Sequence[str] = (), job: str = ""
    ) -> Generator[events_pb2.Event]:
        """Yield the events after a sequence number (None: only new ones), and then new ones as they happen.

        Close the generator to stop. It never ends by itself: when the server stops, it raises
        `ServerUnreachableError`, and a call with the last sequence number continues.
        """
        request = events_pb2.WatchEventsRequest(after_sequence=after_sequence, types=types, job=job)
        call = self._connection.stream(self._events.WatchEvents, request)
        try:
            with self._connection.translate_errors(None):
                yield from call
        finally:
            call.cancel()

    def add_webhook(self, url: str, types: Sequence[str] = ()) -> events_pb2.AddWebhookResponse:
        """Add a webhook for events of some types (empty: all). Only this response has its secret."""
        request = events_pb2.AddWebhookRequest(url=url, types=types)
        return self._connection.call(self._webhooks.AddWebhook, request)

    def list_webhooks(self) -> Sequence[events_pb2.Webhook]:
        """Return all webhooks, without their secrets."""
        request = events_pb2.ListWebhooksRequest()
        return list(self._connection.rows(self._webhooks.ListWebhooks, request, lambda page: page.webhooks, None))

    def remove_webhook(self, webhook_id: str) -> None:
        """Remove a webhook with its pending deliveries."""
        self._connection.call(self._webhooks.RemoveWebhook, events_pb2.RemoveWebhookRequest(webhook_id=webhook_id))

    def test_webhook(self, webhook_id: str) -> events_pb2.Delivery:
        """Send one event to a webhook now, and return the result."""
        return self._connection.call(self._webhooks.TestWebhook, events_pb2.TestWebhookRequest(webhook_id=webhook_id))

    def iter_deliveries(
        self, limit: int | None = None, *, webhook_id: str = "", state: str = ""
    ) -> Iterator[events_pb2.Delivery]:
        """Yield deliveries, the latest event first, at most `limit`: of one webhook, or in one state (empty: all)."""
        request = events_pb2.ListDeliveriesRequest(webhook_id=webhook_id, state=state)
        return self._connection.rows(self._webhooks.ListDeliveries, request, lambda page: page.deliveries, limit)
