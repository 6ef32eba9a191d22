"""The data of the pages: from a server (`server_source`), or from the folder of a simulation (`run_source`).

All methods block; the app calls them in threads. They raise `ServerUnreachableError` if the server does not answer, and
`ServerRefusedError` if it refuses the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from fedplat.wire.v1 import admin_pb2, events_pb2


class Watch(Protocol):
    """The changes of a job."""

    def changes(self) -> Iterator[object]:
        """Yield an item for each change of the job, until it has ended or `close` is called.

        Raises the errors of a source if the server goes away.
        """
        ...

    def close(self) -> None:
        """End `changes`; called from another thread."""
        ...


class PageSource(Protocol):
    """What all pages need: the status, the jobs and their rounds."""

    @property
    def name(self) -> str:
        """The address of the server, or the name of the run."""
        ...

    @property
    def is_simulation(self) -> bool:
        """True if moments are virtual seconds since the start of the run, and nothing can be changed."""
        ...

    @property
    def home(self) -> str:
        """The path of the first page after signing in."""
        ...

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return the status of the server, with the name and the role of the operator."""
        ...

    def list_jobs(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse:
        """Return one page of jobs."""
        ...

    def show_job(self, job: str) -> admin_pb2.Job:
        """Return a job with its job file."""
        ...

    def list_rounds(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse:
        """Return one page of attempts, or a sample of the committed rounds."""
        ...

    def show_round(self, request: admin_pb2.ShowRoundRequest) -> admin_pb2.RoundDetails:
        """Return an attempt with the reasons and labels of its clients."""
        ...

    def list_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
        """Return the last `limit` versions of a job, the latest first."""
        ...

    def show_privacy(self, job: str = "") -> admin_pb2.ShowPrivacyResponse:
        """Return the privacy costs of one job, or of all private ones."""
        ...

    def watch(self, job: str) -> Watch:
        """Return the changes of a job from now on."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class ServerSource(PageSource, Protocol):
    """What only a server has: clients, operators, events, and actions."""

    def list_assignments(self, request: admin_pb2.ListAssignmentsRequest) -> admin_pb2.ListAssignmentsResponse:
        """Return one page of the assignments of an attempt or of a client."""
        ...

    def show_fleet(self, population: str, since_unix_s: float) -> admin_pb2.ShowFleetResponse:
        """Return the counts of clients, and their availability by hour."""
        ...

    def list_clients(self, request: admin_pb2.ListClientsRequest) -> admin_pb2.ListClientsResponse:
        """Return one page of clients."""
        ...

    def show_client(self, client_id: str) -> admin_pb2.Client:
        """Return a client."""
        ...

    def list_audit(self, request: admin_pb2.ListAuditRequest) -> admin_pb2.ListAuditResponse:
        """Return one page of the audit log."""
        ...

    def list_enrollments(self, request: admin_pb2.ListEnrollmentsRequest) -> admin_pb2.ListEnrollmentsResponse:
        """Return one page of enrollment tokens."""
        ...

    def list_operators(self, request: admin_pb2.ListOperatorsRequest) -> admin_pb2.ListOperatorsResponse:
        """Return one page of operators."""
        ...

    def list_events(self, request: events_pb2.ListEventsRequest) -> events_pb2.ListEventsResponse:
        """Return one page of events."""
        ...

    def list_webhooks(self, request: events_pb2.ListWebhooksRequest) -> events_pb2.ListWebhooksResponse:
        """Return one page of webhooks."""
        ...

    def list_deliveries(self, request: events_pb2.ListDeliveriesRequest) -> events_pb2.ListDeliveriesResponse:
        """Return one page of deliveries to webhooks."""
        ...

    def change_job(self, job: str, action: str) -> None:
        """Start, pause, resume or cancel a job: `action` is one of these words."""
        ...

    def rollback(self, job: str, version: int) -> None:
        """Make a job continue from an older version."""
        ...

    def revoke_client(self, client_id: str) -> None:
        """Revoke a client for good."""
        ...

    def revoke_enrollment(self, enrollment_id: str) -> None:
        """Revoke an enrollment token; its clients stay."""
        ...
