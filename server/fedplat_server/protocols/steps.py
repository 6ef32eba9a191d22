"""The steps that clients take within an assignment, in the kinds of jobs whose clients do more than report an update.

A step is one call: the client sends a message, if it has one, and waits for its input, which is what it needs for what
it does next. Both depend on the kind of the job (`StepsHalf`). The input follows from the stored state, so a client
repeats a call until it is answered, and a restarted server answers as before. No message is logged.

Only the client of an assignment may take its steps. A step is refused

- by a status (`RefusedError`) if the job has no such steps, if its message is too large, out of order or not one that
  an honest client sends, or if the client has sent too many bytes in the attempt;
- by a refusal in the response if the assignment has ended, or ends by this message.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, Generic, Literal, TypeVar

from typing_extensions import override

from fedplat.rounds import Assignment, JobState
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.coordination.long_polls import RETRY_SOON, LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.half import HalfParts, ServerHalf

_Message = TypeVar("_Message")
Find = Callable[[JobState, Assignment], Awaitable[tuple[fleet_pb2.StepResponse, bool]]]
"""A function that returns the response for an assignment, and whether the client gets it at once."""


@dataclasses.dataclass(eq=False, repr=False)
class StepPolls:
    """The calls of clients that take steps, whatever the kind of their jobs: how long they wait, and what they send."""

    runner: Runner
    store: JobStore
    clients: client_directory.ClientDirectory
    long_polls: LongPolls
    quotas: rate_limits.Quotas

    def job(self, job_id: str) -> JobState:
        """Return the coordinator's state of an existing job."""
        return self.runner.coordinator.jobs[job_id]

    async def wait(self, before: Assignment, wait_s: float, find: Find) -> fleet_pb2.StepResponse:
        """Return what `find` returns as soon as the client gets it at once, and after `wait_s` in every case."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + wait_s
        while True:
            with self.long_polls.open_step(*before.id) as changed:
                job = self.job(before.key.job_id)
                # Not in the job's state any more: another attempt has begun since.
                current = job.find(*before.id) or await self.store.find_assignment(before.token_hash)
                if current is None:
                    return refuse()
                response, is_next = await find(job, current)
                if is_next or clock() >= ends_at:
                    return response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ends_at - clock())
            await self.clients.find(before.client_id)  # it may have been revoked meanwhile

    def count(self, assignment: Assignment, num_bytes: int, limit: int, num_messages: int) -> None:
        """Refuse a message of more than `limit` bytes, and the bytes of more than `num_messages` in an attempt."""
        if num_bytes > limit:
            text = f"the message has {num_bytes} bytes; at most {limit} are accepted in this step"
            raise RefusedError(Code.TOO_LARGE, text)
        self.quotas.step(assignment.client_id, assignment.key, num_messages * limit, num_bytes)


class StepsHalf(ServerHalf, ABC, Generic[_Message]):
    """The half of a kind of job whose clients take steps."""

    content: ClassVar[Literal["secure", "gossip"]]
    """The field of requests with the message, and of responses with the input."""

    def __init__(self, parts: HalfParts, calls: StepPolls) -> None:
        super().__init__(parts)
        self._calls = calls

    @override
    async def take_step(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        if (content := request.WhichOneof("content") or "unset") != self.content:
            text = f"the content of the step is {content}; expected {self.content} in this job"
            raise RefusedError(Code.INVALID_REQUEST, text)
        message = self._read(client, assignment, request)
        if (refusal := await self._receive(client, assignment, message)) is not None:
            return refusal
        wait_s = validation.wait_s(request.wait_s, self._parts.limits)
        return await self._calls.wait(assignment, wait_s, lambda job, current: self._find_input(job, current, message))

    # --- what differs by the kind -------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest) -> _Message:
        """Return the message of a request. Raises `RefusedError`."""

    @abstractmethod
    async def _receive(
        self, client: ClientRecord, assignment: Assignment, message: _Message
    ) -> fleet_pb2.StepResponse | None:
        """Validate a message, and submit it to the coordinator; return the refusal if it is not accepted.

        The same message again changes nothing. Raises `RefusedError`.
        """

    @abstractmethod
    async def _find_input(
        self, job: JobState, assignment: Assignment, message: _Message
    ) -> tuple[fleet_pb2.StepResponse, bool]:
        """Return the input after a message, and whether the client gets it at once, or what it gets after `wait_s`."""


def refuse(reason: Reason | None = None, text: str = "") -> fleet_pb2.StepResponse:
    """Return the response for an assignment that has ended for a reason, or is not known."""
    return fleet_pb2.StepResponse(refusal=convert.refusal(reason or Reason.STALE, RETRY_SOON, text))
