"""The pages of a server: a client of its admin API. Each session has its own, with its operator's token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import msgspec

from fedplat.admin import AdminClient, Profile
from fedplat.errors import ServerRefusedError
from fedplat.wire.v1 import admin_pb2

TIMEOUT_S = 10.0
"""The deadline of a call: a person waits for the page."""
PROGRESS_EVERY_S = 1.0


def refusal_code(error: ServerRefusedError) -> grpc.StatusCode | None:
    """Return the gRPC status with which the server refused a call."""
    cause = error.__cause__
    return cause.code() if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call) else None


class AdminSource(AdminClient):
    """The pages of the server of a profile."""

    is_simulation = False
    home = "/"

    def __init__(self, profile: Profile, timeout_s: float = TIMEOUT_S) -> None:
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
