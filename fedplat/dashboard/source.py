"""The data of the pages: from a server, by a client of its admin API, or from the folder of a simulation.

All methods block; the app calls them in threads. They raise `ServerUnreachableError` if the server does not answer, and
`ServerRefusedError` if it refuses the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, overload

import grpc
import msgspec

from fedplat import admin, errors
from fedplat.wire.v1 import admin_pb2


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
    """What the pages of a server and of a run need: the status, the jobs and their rounds.

    `page` returns one page of jobs, or one page of attempts or a sample of the committed rounds.
    """

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

    @overload
    def page(self, request: admin_pb2.ListJobsRequest) -> admin_pb2.ListJobsResponse: ...
    @overload
    def page(self, request: admin_pb2.ListRoundsRequest) -> admin_pb2.ListRoundsResponse: ...

    def show_job(self, job: str) -> admin_pb2.Job:
        """Return a job with its job file."""
        ...

    def show_round(self, job: str, round_: int, attempt: int = 0) -> admin_pb2.RoundDetails:
        """Return an attempt (0: the last one at the round) with the reasons and labels of its clients."""
        ...

    def list_latest_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
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


TIMEOUT_S = 10.0
"""The deadline of a call: a person waits for the page."""
PROGRESS_EVERY_S = 1.0


def refusal_code(error: errors.ServerRefusedError) -> grpc.StatusCode | None:
    """Return the gRPC status with which the server refused a call."""
    cause = error.__cause__
    return cause.code() if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call) else None


class AdminSource(admin.AdminClient):
    """The pages of the server of a profile."""

    is_simulation = False
    home = "/"

    def __init__(self, profile: admin.Profile, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(profile, timeout_s=timeout_s)
        self.name = profile.server

    def with_token(self, token: str) -> AdminSource:
        """Return a source for the same server with another operator's token."""
        return AdminSource(msgspec.structs.replace(self.profile, token=token))

    def list_latest_versions(self, job: str, limit: int) -> list[admin_pb2.ModelVersion]:
        """Return the last `limit` versions of a job, the latest first."""
        first = max(0, self.show_job(job).model.version - limit + 1)
        return list(self.iter_versions(job, limit, first_version=first))[::-1]

    def watch(self, job: str) -> AdminWatch:
        """Return the changes of a job, on a connection of its own."""
        return AdminWatch(self.profile, job)

    def change_job(self, job: str, action: str) -> None:
        """Start, pause, resume or cancel a job: `action` is one of these words."""
        changes = {"start": self.start, "pause": self.pause, "resume": self.resume, "cancel": self.cancel}
        changes[action](job)


class AdminWatch:
    """The changes of a job of a server, on a connection of its own, so that closing it ends the call."""

    def __init__(self, profile: admin.Profile, job: str) -> None:
        self._client = admin.AdminClient(profile, timeout_s=TIMEOUT_S)
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
