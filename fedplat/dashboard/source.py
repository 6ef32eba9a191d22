"""The data of the pages, from a server or from a simulation's folder, and one request of a signed-in operator.

All methods block; the app calls them in threads. They raise `ServerUnreachableError` if the server does not answer, and
`ServerRefusedError` if it refuses the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast, overload
from urllib.parse import urlencode

import grpc
import msgspec

from fedplat import admin, errors
from fedplat.errors import ServerRefusedError
from fedplat.web.rendering import Pager
from fedplat.wire import http_requests
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
    cause: Any = error.__cause__
    return cause.code() if isinstance(cause, grpc.Call | http_requests.HttpError) else None


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


MAX_TEXT = 300
"""Characters of a filter. Longer ones are cut."""
PAGE_SIZE = 50


class NotFoundError(Exception):
    """The address names no page."""


@dataclasses.dataclass(frozen=True)
class Paging:
    """The position in a list: the server's token of this page, and the number of its first row."""

    token: str
    first: int


@dataclasses.dataclass(frozen=True)
class Visit:
    """A request for a page. `names` are the variables of the address, `query` its parameters."""

    source: PageSource
    status: admin_pb2.GetStatusResponse
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def server(self) -> AdminSource:
        """The source, if it is a server. Raises `NotFoundError` for a simulation."""
        if self.source.is_simulation:
            raise NotFoundError
        return cast(AdminSource, self.source)

    def text(self, name: str) -> str:
        """Return a parameter; empty without it."""
        return self.query.get(name, "")[:MAX_TEXT].strip()

    def choice(self, name: str, choices: Mapping[str, object] | tuple[str, ...]) -> str:
        """Return a parameter that has one of some values; empty otherwise."""
        value = self.text(name)
        return value if value in choices else ""

    def number(self, name: str) -> int:
        """Return a variable of the address. Raises `NotFoundError` if it is not a number of 32 bits."""
        return parse_number(self.names[name])

    @property
    def paging(self) -> Paging:
        """The position in the list of this page."""
        first = self.text("from")
        return Paging(self.text("page"), int(first) if first.isascii() and first.isdecimal() and len(first) < 10 else 1)

    def pager(self, num_rows: int, total: int, next_token: str) -> Pager:
        """Return the links around a page of rows, with the filters of this page."""
        first = self.paging.first
        kept = {name: value for name, value in self.query.items() if name not in ("page", "from", "live")}
        following = {**kept, "page": next_token, "from": str(first + num_rows)}
        return Pager(
            first=first if num_rows else 0,
            last=first + num_rows - 1 if num_rows else 0,
            total=max(total, first + num_rows - 1 if num_rows else 0),
            next_address=f"{self.path}?{urlencode(following)}" if next_token else "",
            first_address=f"{self.path}?{urlencode(kept)}" if self.paging.token else "",
        )


def parse_number(text: str) -> int:
    """Return a number of an address or a form. Raises `NotFoundError` if it is not a number of 32 bits."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or int(text) >= 2**32:
        raise NotFoundError
    return int(text)


def is_finite(value: float) -> bool:
    """Return whether a metric can be drawn."""
    return math.isfinite(value)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class OptionalResult(Generic[T]):
    """The response to a call, or a sentence about its absence."""

    value: T | None = None
    problem: str = ""


def call_if_supported(call: Callable[[], T]) -> OptionalResult[T]:
    """Return the response; a sentence if the server does not have the call, or the operator may not make it."""
    try:
        return OptionalResult(call())
    except ServerRefusedError as exc:
        code = refusal_code(exc)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return OptionalResult(problem="This server does not record them; update fedplat-server to see them here.")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return OptionalResult(problem=f"{str(exc)[:1].upper()}{str(exc)[1:]}.")
        raise
