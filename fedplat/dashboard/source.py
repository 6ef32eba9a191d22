"""The data of the pages: from a server (`server_source`), or from the folder of a simulation (`run_source`).

All methods block; the app calls them in threads. They raise `ServerUnreachableError` if the server does not answer, and
`ServerRefusedError` if it refuses the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, overload

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
