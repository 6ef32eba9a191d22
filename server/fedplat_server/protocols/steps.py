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
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Literal, TypeVar

from typing_extensions import override

from fedplat.rounds import Assignment, JobState
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.coordination.check_in import RETRY_SOON
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.protocols.half import ServerHalf
from fedplat_server.rpc import convert, validation

_Message = TypeVar("_Message")


class StepsHalf(ServerHalf, ABC, Generic[_Message]):
    """The half of a kind of job whose clients take steps."""

    content: ClassVar[Literal["secure", "gossip"]]
    """The field of requests with the message, and of responses with the input."""

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
        return await self._wait(assignment, validation.wait_s(request.wait_s, self._parts.limits), message)

    async def _wait(self, before: Assignment, wait_s: float, message: _Message) -> fleet_pb2.StepResponse:
        clock, parts = asyncio.get_running_loop().time, self._parts
        ends_at = clock() + wait_s
        while True:
            with parts.long_polls.open_step(*before.id) as changed:
                job = parts.job(before.key.job_id)
                # Not in the job's state any more: another attempt has begun since.
                current = job.find(*before.id) or await parts.store.jobs.find_assignment(before.token_hash)
                if current is None:
                    return refuse()
                response, is_next = await self._find_input(job, current, message)
                if is_next or clock() >= ends_at:
                    return response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ends_at - clock())
            await parts.clients.find(before.client_id)  # it may have been revoked meanwhile

    def _count(
        self, client: ClientRecord, assignment: Assignment, num_bytes: int, limit: int, num_messages: int
    ) -> None:
        """Refuse a message of more than `limit` bytes, and the bytes of more than `num_messages` in an attempt."""
        if num_bytes > limit:
            text = f"the message has {num_bytes} bytes; at most {limit} are accepted in this step"
            raise RefusedError(Code.TOO_LARGE, text)
        self._parts.quotas.step(client.client_id, assignment.key, num_messages * limit, num_bytes)

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
