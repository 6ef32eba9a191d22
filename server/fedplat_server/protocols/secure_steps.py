"""The steps of secure aggregations: validates what clients send, submits it, and returns the input of the next step.

A message is bounded, and validated against the stored roster, before the coordinator sees it. The same message again
changes nothing, so clients repeat a call until it is answered. No message is logged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

from fedplat.errors import SecureAggregationError
from fedplat.rounds import Assignment, Attempt, JobState
from fedplat.rounds.events import KeysAdvertised, MasksAnswered, SharesSent, SurvivorsConfirmed, UpdateRejected
from fedplat.rounds.states import AssignmentState, AttemptPhase, Reason
from fedplat.secure_aggregation import messages, unmasking
from fedplat.secure_aggregation.messages import Confirmation, KeyAdvertisement, SealedShares, UnmaskAnswer
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.aggregation.secure_attempts import RosterGroup, SecureAttempts, has_begun
from fedplat_server.coordination.check_in import RETRY_SOON
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.steps import StepParts, Steps

Step: TypeAlias = Literal["keys", "shares", "confirmation", "answer"]
_Event: TypeAlias = KeysAdvertised | SharesSent | SurvivorsConfirmed | MasksAnswered
_EVENTS: dict[Step, Callable[..., _Event]] = {
    "keys": KeysAdvertised,
    "shares": SharesSent,
    "confirmation": SurvivorsConfirmed,
    "answer": MasksAnswered,
}
_PHASES: dict[Step, AttemptPhase] = {
    "keys": AttemptPhase.ADVERTISING,
    "shares": AttemptPhase.SHARING,
    "confirmation": AttemptPhase.CONFIRMING,
    "answer": AttemptPhase.UNMASKING,
}
"""The phase in which each message is expected: not before, since it depends on what the phase begins with."""
_INPUT_PHASES: dict[Step | None, AttemptPhase] = {
    "keys": AttemptPhase.SHARING,
    "shares": AttemptPhase.COLLECTING,
    None: AttemptPhase.CONFIRMING,
    "confirmation": AttemptPhase.UNMASKING,
    "answer": AttemptPhase.COMMITTING,
}
"""The phase from which on a client can have the input of the step after each message."""
_SEND_AGAIN_FACTOR = 8
"""Total size of a client's new messages for an attempt, as a multiple of the largest one."""


class SecureSteps(Steps):
    """Handles the steps of clients for their assignments."""

    def __init__(self, parts: StepParts, secure: SecureAttempts) -> None:
        super().__init__(parts)
        self._secure = secure

    async def take(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.SecureStepRequest
    ) -> fleet_pb2.SecureStepResponse:
        """Take a step; return the input of the next one once it is there, after at most `request.wait_s`.

        Raises `RefusedError` if the message is too large or out of order.
        """
        job = self._parts.job(assignment.key.job_id)
        step = request.WhichOneof("message")
        if step is not None and (ended := await self._receive(client, job, assignment, step, request)) is not None:
            return ended
        wait_s = validation.wait_s(request.wait_s, self._parts.limits)
        return await self._wait(assignment, wait_s, functools.partial(self._find_input, step))

    async def _receive(
        self,
        client: ClientRecord,
        job: JobState,
        assignment: Assignment,
        step: Step,
        request: fleet_pb2.SecureStepRequest,
    ) -> fleet_pb2.SecureStepResponse | None:
        """Validate and store the message of a step; return the refusal if it is not accepted."""
        content: bytes = getattr(request, step)
        stored: bytes = getattr(assignment.secure, step) if assignment.secure is not None else b""
        if stored == content and content:
            return None
        attempt = _open_attempt(job, assignment)
        if attempt is None:
            return _refuse(assignment)
        if stored:
            return _refusal(Reason.REJECTED_CONFLICT, f"other {step} were accepted before; they are kept")
        setup = await self._secure.setup(job, assignment.key)
        limit = messages.max_bytes(min(setup.encoding.max_clients, messages.MAX_GROUP))
        if len(content) > limit:
            text = f"the {step} have {len(content)} bytes; at most {limit} are accepted in this group"
            raise RefusedError(Code.TOO_LARGE, text)
        self._parts.quotas.step(client.client_id, assignment.key, _SEND_AGAIN_FACTOR * limit, len(content))
        if not has_begun(attempt, _PHASES[step]):
            text = f"{step} are expected when the attempt is {_PHASES[step]}; it is {attempt.phase}"
            raise RefusedError(Code.INVALID_REQUEST, text)
        try:
            await self._validate(client, job, assignment, step, content)
        except SecureAggregationError as exc:
            return await self._reject(assignment, str(exc))
        verdict = await self._parts.runner.submit(_EVENTS[step](assignment.key, client.client_id, content))
        if verdict.accepted:
            return None
        return _refusal(verdict.reason or Reason.STALE, verdict.text)

    async def _validate(
        self, client: ClientRecord, job: JobState, assignment: Assignment, step: Step, content: bytes
    ) -> None:
        """Raise `SecureAggregationError` for an invalid message. Never shows the message."""
        secure = self._secure
        if step == "keys":
            keys = KeyAdvertisement.from_bytes(content)
            unmasking.check_keys(await secure.setup(job, assignment.key), client.public_key, keys)
            return
        group, position = await self._place(job, assignment)
        attempt = _open_attempt(job, assignment)
        assert attempt is not None
        match step:
            case "shares":
                unmasking.check_shares(group.graph, position, SealedShares.from_bytes(content))
            case "confirmation":
                confirmation = Confirmation.from_bytes(content)
                survivors = group.survivors(attempt)
                unmasking.check_confirmation(group.setup, group.members, position, survivors, confirmation)
            case "answer":
                answer = UnmaskAnswer.from_bytes(content)
                unmasking.check_answer(group.graph, position, group.survivors(attempt), answer)

    async def _place(self, job: JobState, assignment: Assignment) -> tuple[RosterGroup, int]:
        """Return the group of an assignment, and its position there."""
        if assignment.secure is None or assignment.secure.group < 0:
            raise SecureAggregationError("the client has no place on the roster; expected its keys first")
        groups = await self._secure.groups(job)
        return groups[assignment.secure.group], assignment.secure.position

    async def _reject(self, assignment: Assignment, text: str) -> fleet_pb2.SecureStepResponse:
        """Refuse an invalid message, and end the assignment if the client still works for it.

        The update of a client that has reported stays in the sum: it only does not help to remove the masks.
        """
        text = validation.text(text, self._parts.limits.max_text)
        if assignment.is_busy:
            event = UpdateRejected(*assignment.id, Reason.REJECTED_MESSAGE, text)
            verdict = await self._parts.runner.submit(event)
            if not verdict.accepted:
                return _refusal(verdict.reason or Reason.STALE, verdict.text)
        return _refusal(Reason.REJECTED_MESSAGE, text)

    async def _find_input(
        self, step: Step | None, job: JobState, assignment: Assignment | None
    ) -> tuple[fleet_pb2.SecureStepResponse, bool]:
        """Return the input of the step after this one, or `Waiting`, or the refusal if the assignment has ended."""
        if assignment is None:
            return _refusal(Reason.STALE), True
        attempt = _open_attempt(job, assignment)
        if attempt is None or assignment.secure is None:
            return _refuse(assignment), True
        if has_begun(attempt, AttemptPhase.COMMITTING) or (step == "answer" and assignment.secure.answer):
            return fleet_pb2.SecureStepResponse(done=fleet_pb2.Done()), True
        if has_begun(attempt, _INPUT_PHASES[step]):
            return await self._make_input(job, attempt, assignment, step), True
        remaining_s = max(self._deadline(attempt, assignment) - self._parts.runner.now, 0.0)
        return fleet_pb2.SecureStepResponse(waiting=fleet_pb2.Waiting(remaining_s=remaining_s)), False

    async def _make_input(
        self, job: JobState, attempt: Attempt, assignment: Assignment, step: Step | None
    ) -> fleet_pb2.SecureStepResponse:
        group, position = await self._place(job, assignment)
        if step == "keys":
            return fleet_pb2.SecureStepResponse(roster=group.roster(position))
        if step == "shares":
            return fleet_pb2.SecureStepResponse(shares=group.held_shares(attempt, position))
        if has_begun(attempt, AttemptPhase.UNMASKING):
            return fleet_pb2.SecureStepResponse(unmask=group.unmask_request(attempt))
        return fleet_pb2.SecureStepResponse(survivors=group.survivors(attempt).to_bytes())

    def _deadline(self, attempt: Attempt, assignment: Assignment) -> float:
        return attempt.step_ends_at if attempt.step_ends_at is not None else assignment.deadline_at


def _open_attempt(job: JobState, assignment: Assignment) -> Attempt | None:
    """Return the attempt of an assignment if both are open."""
    attempt = job.open_attempt
    is_current = attempt is not None and attempt.key == assignment.key and assignment.is_open
    return attempt if is_current else None


def _refuse(assignment: Assignment) -> fleet_pb2.SecureStepResponse:
    """Return the response for an assignment that has ended."""
    if assignment.state is AssignmentState.MERGED:
        return fleet_pb2.SecureStepResponse(done=fleet_pb2.Done())
    return _refusal(assignment.reason or Reason.STALE, assignment.text)


def _refusal(reason: Reason, text: str = "") -> fleet_pb2.SecureStepResponse:
    return fleet_pb2.SecureStepResponse(refusal=convert.refusal(reason, RETRY_SOON, text))
