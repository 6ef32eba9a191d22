"""The server's half of jobs with secure aggregation: its steps, and the sum from which masks are removed.

It validates what clients send in a step, submits it, and returns the input of the next step. A message is bounded, and
validated against the stored roster, before the coordinator sees it.

Masked updates are added as they arrive, modulo 2^modulus, in one vector for each group, and mean nothing before. The
masks of a group are removed with the answers of its members (Bonawitz et al. 2017, section 4, round 4), which are in
the job's state by then; the cores of this machine share the work, with or without a worker pool. The mean of all groups
is one update for the job's rule, as that of other jobs with robust rules or privacy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from typing_extensions import override

from fedplat import model, report_validation
from fedplat.aggregate import Contribution, Rule
from fedplat.errors import SecureAggregationError
from fedplat.job.secure import mean_update
from fedplat.model.turns import spread_vector
from fedplat.model.values import VectorValues
from fedplat.rounds import Assignment, Attempt, AttemptKey, JobState, Verdict
from fedplat.rounds.commands import ACCEPTED
from fedplat.rounds.events import KeysAdvertised, MasksAnswered, SharesSent, SurvivorsConfirmed, UpdateRejected
from fedplat.rounds.states import AssignmentState, AttemptPhase, Reason
from fedplat.secure_aggregation import encoding, messages, unmasking
from fedplat.secure_aggregation.encoding import Decoded
from fedplat.secure_aggregation.messages import (
    Confirmation,
    KeyAdvertisement,
    SealedShares,
    UnmaskAnswer,
    word_of,
)
from fedplat.secure_aggregation.setup import AnySetup, Encoding
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import errors, logs, retries
from fedplat_server.aggregation import backend
from fedplat_server.aggregation.backend import Aggregate, AggregationBackend, LocalAggregation
from fedplat_server.aggregation.secure_attempts import RosterGroup, SecureAttempts, has_begun
from fedplat_server.database.records import ClientRecord
from fedplat_server.messages import validation
from fedplat_server.protocols.half import HalfParts, StepPolls, StepsHalf, Validate, refuse_step
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs, SpooledUpdate

_MASKING_STATES = frozenset({AssignmentState.SHARED, AssignmentState.UPLOADING})
"""States in which a client has the masks for its update."""
_Kind: TypeAlias = Literal["keys", "shares", "confirmation", "answer"]
_Event: TypeAlias = KeysAdvertised | SharesSent | SurvivorsConfirmed | MasksAnswered
_EVENTS: dict[_Kind, Callable[..., _Event]] = {
    "keys": KeysAdvertised,
    "shares": SharesSent,
    "confirmation": SurvivorsConfirmed,
    "answer": MasksAnswered,
}
_PHASES: dict[_Kind, AttemptPhase] = {
    "keys": AttemptPhase.ADVERTISING,
    "shares": AttemptPhase.SHARING,
    "confirmation": AttemptPhase.CONFIRMING,
    "answer": AttemptPhase.UNMASKING,
}
"""The phase in which each message is expected: not before, since it depends on what the phase begins with."""
_INPUT_PHASES: dict[_Kind | None, AttemptPhase] = {
    "keys": AttemptPhase.SHARING,
    "shares": AttemptPhase.COLLECTING,
    None: AttemptPhase.CONFIRMING,
    "confirmation": AttemptPhase.UNMASKING,
    "answer": AttemptPhase.COMMITTING,
}
"""The phase from which on a client can have the input of the step after each message."""
_MAX_MESSAGES = 8
"""Total size of a client's new messages for an attempt, as a multiple of the largest one."""


class SecureHalf(StepsHalf[fleet_pb2.SecureMessage]):
    """Jobs with secure aggregation: updates are masked, and the server learns their sum only."""

    content = "secure"

    def __init__(self, parts: HalfParts, calls: StepPolls, secure: SecureAttempts) -> None:
        super().__init__(parts, calls)
        self._secure = secure

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        setup = await self._secure.setup(job, key)
        return fleet_pb2.Assignment(secure_setup=setup.to_bytes())

    @override
    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        """Refuse an update of a client that cannot have masked it, so that it is never stored."""
        attempt = job.open_attempt
        collects = attempt is not None and attempt.phase is AttemptPhase.COLLECTING
        if collects and assignment.state in _MASKING_STATES:
            return ACCEPTED
        return Verdict(Reason.REJECTED_MESSAGE, "the update came before the client had its masks; take its steps first")

    @override
    async def size_limit(self, job: JobState, assignment: Assignment) -> int:
        return encoding.file_bytes(await self._secure.setup(job, assignment.key))

    @override
    def judge_claims(self, rule: Rule, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        return report_validation.validate_secure_claims(request.num_examples, request.metrics)

    @override
    async def validator(self, job: JobState, assignment: Assignment, base: Path) -> Validate:
        setup = await self._secure.setup(job, assignment.key)
        return lambda part, _: report_validation.validate_masked(part.path, setup)

    @override
    async def running_norm(self, job: JobState, assignment: Assignment) -> None:
        return None  # masked

    @override
    def stores_rows(self, job: JobState) -> bool:
        return False  # a masked update must not outlive its attempt in a backup or a log of the database

    @override
    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> MaskedAggregation:
        return MaskedAggregation(find_job, self._secure, UpdateSums(inputs, blobs))

    @override
    def _read(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.SecureMessage:
        return request.secure

    @override
    async def _receive(
        self, client: ClientRecord, assignment: Assignment, message: fleet_pb2.SecureMessage
    ) -> fleet_pb2.StepResponse | None:
        if (kind := message.WhichOneof("message")) is None:
            return None
        content: bytes = getattr(message, kind)
        stored: bytes = getattr(assignment.secure, kind) if assignment.secure is not None else b""
        if stored == content and content:
            return None
        job = self._calls.job(assignment.key.job_id)
        attempt = _open_attempt(job, assignment)
        if attempt is None:
            return _refuse_ended(assignment)
        if stored:
            return refuse_step(Reason.REJECTED_CONFLICT, f"other {kind} were accepted before; they are kept")
        setup = await self._secure.setup(job, assignment.key)
        limit = messages.max_bytes(min(setup.encoding.max_clients, messages.MAX_GROUP))
        self._calls.count(assignment, len(content), limit, _MAX_MESSAGES)
        if not has_begun(attempt, _PHASES[kind]):
            text = f"{kind} are expected when the attempt is {_PHASES[kind]}; it is {attempt.phase}"
            raise errors.RefusedError(errors.Code.INVALID_REQUEST, text)
        try:
            await self._validate(client, job, assignment, kind, content)
        except SecureAggregationError as exc:
            return await self._reject(assignment, str(exc))
        verdict = await self._calls.runner.submit(_EVENTS[kind](assignment.key, client.client_id, content))
        return None if verdict.accepted else refuse_step(verdict.reason, verdict.text)

    async def _validate(
        self, client: ClientRecord, job: JobState, assignment: Assignment, kind: _Kind, content: bytes
    ) -> None:
        """Raise `SecureAggregationError` for an invalid message. Never shows the message."""
        secure = self._secure
        if kind == "keys":
            keys = KeyAdvertisement.from_bytes(content)
            unmasking.check_keys(await secure.setup(job, assignment.key), client.public_key, keys)
            return
        group, position = await self._place(job, assignment)
        attempt = _open_attempt(job, assignment)
        assert attempt is not None
        match kind:
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

    async def _reject(self, assignment: Assignment, text: str) -> fleet_pb2.StepResponse:
        """Refuse an invalid message, and end the assignment if the client still works for it.

        The update of a client that has reported stays in the sum: it only does not help to remove the masks.
        """
        text = validation.text(text, self._parts.limits.max_text)
        if assignment.is_busy:
            event = UpdateRejected(*assignment.id, Reason.REJECTED_MESSAGE, text)
            verdict = await self._calls.runner.submit(event)
            if not verdict.accepted:
                return refuse_step(verdict.reason, verdict.text)
        return refuse_step(Reason.REJECTED_MESSAGE, text)

    @override
    async def _find_input(
        self, job: JobState, assignment: Assignment, message: fleet_pb2.SecureMessage
    ) -> tuple[fleet_pb2.StepResponse, bool]:
        kind, attempt = message.WhichOneof("message"), _open_attempt(job, assignment)
        if attempt is None or assignment.secure is None:
            return _refuse_ended(assignment), True
        if has_begun(attempt, AttemptPhase.COMMITTING) or (kind == "answer" and assignment.secure.answer):
            return fleet_pb2.StepResponse(done=fleet_pb2.Done()), True
        if has_begun(attempt, _INPUT_PHASES[kind]):
            return fleet_pb2.StepResponse(secure=await self._make_input(job, attempt, assignment, kind)), True
        ends_at = attempt.step_ends_at if attempt.step_ends_at is not None else assignment.deadline_at
        remaining_s = max(ends_at - self._calls.runner.now, 0.0)
        return fleet_pb2.StepResponse(waiting=fleet_pb2.Waiting(remaining_s=remaining_s)), False

    async def _make_input(
        self, job: JobState, attempt: Attempt, assignment: Assignment, kind: _Kind | None
    ) -> fleet_pb2.SecureInput:
        group, position = await self._place(job, assignment)
        if kind == "keys":
            return fleet_pb2.SecureInput(roster=group.roster(position))
        if kind == "shares":
            return fleet_pb2.SecureInput(shares=group.held_shares(attempt, position))
        if has_begun(attempt, AttemptPhase.UNMASKING):
            return fleet_pb2.SecureInput(unmask=group.unmask_request(attempt))
        return fleet_pb2.SecureInput(survivors=group.survivors(attempt).to_bytes())


def _open_attempt(job: JobState, assignment: Assignment) -> Attempt | None:
    """Return the attempt of an assignment if both are open."""
    attempt = job.open_attempt
    is_current = attempt is not None and attempt.key == assignment.key and assignment.is_open
    return attempt if is_current else None


def _refuse_ended(assignment: Assignment) -> fleet_pb2.StepResponse:
    """Return the response for an assignment that has ended."""
    if assignment.state is AssignmentState.MERGED:
        return fleet_pb2.StepResponse(done=fleet_pb2.Done())
    return refuse_step(assignment.reason, assignment.text)


class _MaskedSum(NamedTuple):
    """The sum of the masked updates of a group, modulo 2^modulus, and the positions of the clients that are in it."""

    total: encoding.Words
    positions: set[int]


class GroupSum(NamedTuple):
    """The sum of a group without masks, still encoded, and the clients that gave wrong shares."""

    setup: AnySetup
    total: encoding.Words
    num_survivors: int
    wrong: Sequence[str]


class UnmaskedSums(Protocol):
    """What becomes of the sums of all groups."""

    async def commit(self, job: JobState, sums: Sequence[GroupSum], draft: Path | None) -> Aggregate:
        """Decode the sums, and make the next version of them. Raises as `AggregationBackend.commit`."""
        ...

    async def close(self) -> None:
        """Release what is left."""


class UpdateSums(UnmaskedSums):
    """Sums of updates: the mean of all groups is one update for the job's rule."""

    def __init__(self, inputs: AttemptInputs, blobs: BlobStore) -> None:
        self._inputs, self._local = inputs, LocalAggregation(inputs, blobs)

    @override
    async def commit(self, job: JobState, sums: Sequence[GroupSum], draft: Path | None) -> Aggregate:
        result = await backend.run_to_the_end(self._fold_mean, sums)
        aggregate = await self._local.commit(draft)
        return dataclasses.replace(
            aggregate, num_updates=result.num_survivors, total_weight=result.weight, published=result.metrics
        )

    @override
    async def close(self) -> None:
        await self._local.close()

    def _fold_mean(self, sums: Sequence[GroupSum]) -> Decoded:
        """Give the mean of all updates to the job's rule, as one update of weight 1; return their sum."""
        result = functools.reduce(encoding.merge, map(self._decode, sums))
        base = model.ModelFile.open(self._inputs.base_path)
        spec = self._inputs.spec
        uploaded = spec.turn(self._inputs.round).select_uploaded(base.schema)
        mean = spread_vector(mean_update(spec, result), uploaded, base.schema)
        self._local.fold_values(VectorValues(base, mean), Contribution(1.0))
        return result

    @staticmethod
    def _decode(each: GroupSum) -> Decoded:
        assert isinstance(each.setup.encoding, Encoding)
        return encoding.decode(each.setup.encoding, each.total.view(np.uint32), each.num_survivors)


class MaskedAggregation(AggregationBackend):
    """A backend that learns the sum of the updates of each group, and nothing else about them.

    `find_job` returns the job as it is when the attempt commits: with the answers of the clients.
    """

    def __init__(self, find_job: Callable[[], JobState], secure: SecureAttempts, unmasked: UnmaskedSums) -> None:
        self._find_job = find_job
        self._secure = secure
        self._unmasked = unmasked
        self._sums: dict[int, _MaskedSum] = {}

    @property
    @override
    def keeps_updates(self) -> bool:
        return False

    @override
    async def fold(self, updates: Sequence[SpooledUpdate]) -> None:
        for update in updates:
            await self._add(update)

    async def _add(self, update: SpooledUpdate) -> None:
        job = self._find_job()
        assert job.open_attempt is not None
        part = job.open_attempt.assignments[update.contribution.client_id].secure
        assert part is not None
        setup = await self._secure.setup(job, job.open_attempt.key)
        if part.group not in self._sums:
            word = word_of(setup.encoding.modulus)
            self._sums[part.group] = _MaskedSum(np.zeros(setup.encoding.length, word), set())
        masked = self._sums[part.group]
        await backend.run_to_the_end(encoding.add_file, Path(update.path), setup, masked.total)
        masked.positions.add(part.position)

    @override
    async def commit(self, draft: Path | None = None) -> Aggregate:
        job = self._find_job()
        attempt = job.open_attempt
        assert attempt is not None
        pauses = itertools.repeat(retries.STORE_RETRY_S)
        groups = await retries.retry(lambda: self._secure.groups(job), errors.StoreUnavailableError, pauses)
        started = time.perf_counter()
        unmasked = await backend.run_to_the_end(self._unmask, attempt, groups)
        logs.get().info(
            "the masks of all groups were removed",
            survivors=[each.num_survivors for each in unmasked],
            seconds=round(time.perf_counter() - started, 3),
        )
        if wrong := [client_id for each in unmasked for client_id in each.wrong]:
            await self._secure.note_wrong_shares(attempt.key, wrong)
        return await self._unmasked.commit(job, unmasked, draft)

    @override
    async def close(self) -> None:
        await self._unmasked.close()

    def _unmask(self, attempt: Attempt, groups: Sequence[RosterGroup]) -> list[GroupSum]:
        """Remove the masks of all groups, on all cores."""
        num_cores = len(os.sched_getaffinity(0))
        num_threads = min(len(groups), num_cores)
        unmask = functools.partial(self._unmask_group, attempt, groups, max(1, num_cores // num_threads))
        with ThreadPoolExecutor(num_threads, "unmask") as threads:
            return list(threads.map(unmask, range(len(groups))))

    def _unmask_group(self, attempt: Attempt, groups: Sequence[RosterGroup], workers: int, number: int) -> GroupSum:
        group, masked = groups[number], self._sums.get(number)
        survivors = group.survivors(attempt)
        setup, num_survivors = group.setup, len(survivors.survivors)
        if masked is None or masked.positions != {*survivors.survivors}:
            raise SecureAggregationError(f"the sum of group {number} has other updates than those of its survivors")
        if num_survivors < max(setup.minimum, group.graph.threshold):
            raise SecureAggregationError(
                f"group {number} has {num_survivors} survivors; expected {setup.minimum} or more, so it stays masked"
            )
        wrong = unmasking.remove_masks(
            setup, group.members, group.sent_shares(attempt), survivors, group.answers(attempt), masked.total, workers
        )
        culprits = [group.members[position].client_id for position in sorted(wrong)]
        return GroupSum(setup, masked.total, num_survivors, culprits)
