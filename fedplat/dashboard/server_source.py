"""The pages of a server: a client of its admin API. Each session has its own, with its operator's token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import msgspec

from fedplat.admin import AdminClient, Profile
from fedplat.admin.connection import AdminConnection
from fedplat.errors import ServerRefusedError
from fedplat.wire.v1 import admin_pb2, events_pb2, events_pb2_grpc

TIMEOUT_S = 10.0
"""The deadline of a call: a person waits for the page."""
PROGRESS_EVERY_S = 1.0


def refusal_code(error: ServerRefusedError) -> grpc.StatusCode | None:
    """Return the gRPC status with which the server refused a call."""
    cause = error.__cause__
    return cause.code() if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call) else None


class AdminSource:
    """The pages of the server of a profile."""

    is_simulation = False
    home = "/"

    def __init__(self, profile: Profile, timeout_s: float = TIMEOUT_S) -> None:
        self._client = AdminClient(profile, timeout_s=timeout_s)
        self._connection = AdminConnection(profile, timeout_s)  # for single pages of events
        self._events = events_pb2_grpc.EventsStub(self._connection.channel)
        self._webhooks = events_pb2_grpc.WebhooksStub(self._connection.channel)
        self._profile = profile

    @property
    def name(self) -> str:
        """The address of the server."""
        return self._profile.server

    def with_token(self, token: str) -> AdminSource:
        """Return a source for the same server with another operator's token."""
        return AdminSource(msgspec.structs.replace(self._profile, token=token))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
        self._connection.close()

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return the status of the server."""
        return self._client.status()

    def list_jobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        """Return one page of jobs."""
        return self._client.list_jobs_page(request)

    def show_job(self, job: str) -> admin_pb2.Job:
        """Return a job with its job file."""
        return self._client.show_job(job)

    def list_rounds(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse:
        """Return one page of attempts, or a sample of the committed rounds."""
        return self._client.list_rounds_page(request)

    def show_round(self, request: admin_pb2.ShowRoundRequest) -> admin_pb2.RoundDetails:
        """Return an attempt with the reasons and labels of its clients."""
        return self._client.show_round(request.job, request.round, request.attempt)

    def list_assignments(self, request: admin_pb2.ListAssignmentsRequest) -> admin_pb2.ListAssignmentsResponse:
        """Return one page of assignments."""
        return self._client.list_assignments_page(request)

    def list_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
        """Return the last `limit` versions of a job, the latest first."""
        first = max(0, self._client.show_job(job).model.version - limit + 1)
        return list(self._client.iter_versions(job, limit, first_version=first))[::-1]

    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        """Return the privacy costs of one job, or of all private ones."""
        return self._client.show_privacy(job)

    def watch(self, job: str) -> AdminWatch:
        """Return the changes of a job, on a connection of its own."""
        return AdminWatch(self._profile, job)

    def show_fleet(self, population: str, since_unix_s: float) -> admin_pb2.ShowFleetResponse:
        """Return the counts of clients, and their availability by hour."""
        return self._client.show_fleet(population, since_unix_s)

    def list_clients(self, request: admin_pb2.ListClientsRequest) -> admin_pb2.ListClientsResponse:
        """Return one page of clients."""
        return self._client.list_clients_page(request)

    def show_client(self, client_id: str) -> admin_pb2.Client:
        """Return a client."""
        return self._client.show_client(client_id)

    def list_audit(self, request: admin_pb2.ListAuditRequest) -> admin_pb2.ListAuditResponse:
        """Return one page of the audit log."""
        return self._client.list_audit_page(request)

    def list_enrollments(self, request: admin_pb2.ListEnrollmentsRequest) -> admin_pb2.ListEnrollmentsResponse:
        """Return one page of enrollment tokens."""
        return self._client.list_enrollments_page(request)

    def list_operators(self, request: admin_pb2.ListOperatorsRequest) -> admin_pb2.ListOperatorsResponse:
        """Return all operators as one page."""
        return admin_pb2.ListOperatorsResponse(operators=self._client.list_operators())

    def list_events(self, request: events_pb2.ListEventsRequest) -> events_pb2.ListEventsResponse:
        """Return one page of events."""
        return self._connection.call(self._events.ListEvents, request)

    def list_webhooks(self, request: events_pb2.ListWebhooksRequest) -> events_pb2.ListWebhooksResponse:
        """Return one page of webhooks."""
        return self._connection.call(self._webhooks.ListWebhooks, request)

    def list_deliveries(self, request: events_pb2.ListDeliveriesRequest) -> events_pb2.ListDeliveriesResponse:
        """Return one page of deliveries to webhooks."""
        return self._connection.call(self._webhooks.ListDeliveries, request)

    def change_job(self, job: str, action: str) -> None:
        """Start, pause, resume or cancel a job."""
        client = self._client
        changes = {"start": client.start, "pause": client.pause, "resume": client.resume, "cancel": client.cancel}
        changes[action](job)

    def rollback(self, job: str, version: int) -> None:
        """Make a job continue from an older version."""
        self._client.rollback(job, version)

    def revoke_client(self, client_id: str) -> None:
        """Revoke a client for good."""
        self._client.revoke_client(client_id)

    def revoke_enrollment(self, enrollment_id: str) -> None:
        """Revoke an enrollment token; its clients stay."""
        self._client.revoke_enrollment(enrollment_id)


class AdminWatch:
    """The changes of a job of a server, on a connection of its own, so that closing it ends the call."""

    def __init__(self, profile: Profile, job: str) -> None:
        self._client = AdminClient(profile, timeout_s=TIMEOUT_S)
        self._job = job

    def changes(self) -> Iterator[object]:
        """Yield the new events of the job until it has ended."""
        with contextlib.closing(
            self._client.watch_job(self._job, progress_every_s=PROGRESS_EVERY_S, only_new=True)
        ) as events:
            yield from events

    def close(self) -> None:
        """End `changes`."""
        self._client.close()
