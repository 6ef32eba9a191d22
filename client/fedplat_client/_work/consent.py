"""What a client asks before it works for a job, and before something of it leaves.

The owner of a client without approvals allows every job (`Consent`); `fedplat_client._consent` has the other one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fedplat.wire.v1 import fleet_pb2
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.released import ReleasedItem
from fedplat_client.cancellation import StopSignal


class ReleaseMarks(NamedTuple):
    """What a line of the record says of the consent: see the fields of `ReleasedLine` with these names."""

    job_digest: str = ""
    base_digest: str = ""
    approvals: int = 0


class Consent:
    """The consent to every job. Methods raise `AssignmentFailedError` for what is not allowed."""

    longest_wait_s = math.inf
    """How long a check-in may wait: after it, what the client may run is read again."""

    @property
    def is_due(self) -> bool:
        """True if the next check-in needs a `refresh` before it."""
        return False

    def check(self, assignment: fleet_pb2.Assignment) -> None:
        """Check an assignment before anything is done for it."""

    def check_release(self, assignment: fleet_pb2.Assignment, item: ReleasedItem) -> ReleaseMarks:
        """Check that what is sent next may still leave; return what its line of the record says of that."""
        return ReleaseMarks()

    def refresh(self, connection: Connection, stop: StopSignal) -> None:
        """Read the jobs that the server offers. Raises `CallError` or `Cancelled`."""

    def announce(self) -> fleet_pb2.OwnerApprovals | None:
        """Return what a check-in says of the consent; None: no job needs it."""
        return None
