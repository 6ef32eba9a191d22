"""The server's half of decentralised jobs, which never get a model from a silo.

It validates what silos report in a step, submits it, and returns what they have to do. `fedplat.gossip.steps.instruct`
derives that from the stored state of the job. No message has a model.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from typing_extensions import override

from fedplat import claims
from fedplat.errors import GossipError, SecureAggregationError
from fedplat.gossip import ring, steps, topology
from fedplat.gossip.messages import Announcement
from fedplat.gossip.state import GossipState
from fedplat.gossip.topology import describe_edges_problem, describe_unknown
from fedplat.job import JobSpec
from fedplat.rounds import Assignment, AttemptKey, Change, JobState, Verdict
from fedplat.rounds.events import SiloReported
from fedplat.rounds.protocols.gossip import find_state, state_of
from fedplat.rounds.states import AssignmentState
from fedplat.secure_aggregation.messages import KEY_BYTES, SIGNATURE_BYTES
from fedplat.secure_aggregation.primitives import is_signature
from fedplat.secure_aggregation.relay import RelayExchange, RelayKey, RelayMember
from fedplat.wire import auth, messages
from fedplat.wire.v1 import admin_pb2, fleet_pb2, gossip_pb2
from fedplat_server.database.records import ClientRecord
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import streams, validation
from fedplat_server.protocols import half, relay
from fedplat_server.protocols.half import StepPolls, StepsHalf, refuse_step
from fedplat_server.protocols.relay import SilenceMonitor
from fedplat_server.storage import files

MAX_NAMED = 10
"""Number of silos that are unreachable, or excluded, which a description of a job names."""
_MAX_MESSAGES = 64
"""Total size of a silo's messages in a round, with those that it repeats, as a multiple of the largest one."""
_FILE_FACTOR = 4
_FILE_EXTRA = 64 * 2**10
"""A silo's file has at most `_FILE_FACTOR` times the bytes of the model (float64 for bf16), and so many more."""


class GossipHalf(StepsHalf[steps.SiloMessage]):
    """Decentralised jobs: silos send each other their models; the server has their steps and encrypted files."""

    content = "gossip"

    def __init__(
        self,
        parts: half.HalfParts,
        calls: StepPolls,
        clients: ClientStore,
        make_relay: Callable[[relay.ListWaiting], relay.Relay],
        silence: SilenceMonitor,
    ) -> None:
        super().__init__(parts, calls)
        self._waiting: dict[str, dict[str, steps.Contact]] = {}  # by job: who waits for the mean in the relay
        self._clients = clients
        self._relay = make_relay(lambda job_id: self._waiting.get(job_id, {}).keys())
        self._silence = silence

    @override
    async def check_job(self, spec: JobSpec) -> None:
        """Check the names in the edges of the job."""
        mode = spec.gossip
        assert mode is not None
        if mode.topology != "edges":
            return
        if unknown := describe_unknown(mode, await self._find_silos(spec, mode.named_silos[: steps.MAX_SILOS + 1])):
            raise RefusedError(
                Code.INVALID_JOB_FILE,
                f"{unknown} in population {spec.population}; expected ids of its clients, as `fedplat client list "
                f"--population {spec.population}` shows them",
            )
        if problem := describe_edges_problem(mode, spec.selection.goal):
            raise RefusedError(Code.INVALID_JOB_FILE, problem)

    async def _find_silos(self, spec: JobSpec, names: Sequence[str]) -> set[str]:
        """Return those of the named silos that can take part in a job."""
        known = [name for name in names if validation.is_client_id(name)]
        found = await self._clients.find_clients(known) if known else {}
        able = (each for each in found.values() if each.population == spec.population and each.revoked_unix_s is None)
        return {each.client_id for each in able}

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        mode, trains = _mode(job), state_of(job).round <= job.spec.rounds
        setup = gossip_pb2.GossipSetup(trains=trains, exchange=mode.exchange, gamma=mode.gamma)
        return fleet_pb2.Assignment(gossip_setup=setup)

    @override
    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        text = "silos of a decentralised job send no updates to the server; expected Step"
        raise RefusedError(Code.INVALID_REQUEST, text)

    @override
    async def receive_file(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[streams.UploadMessage]
    ) -> int:
        return await self._relay.receive(assignment, header, messages)

    @override
    async def count_received(self, assignment: Assignment, request: fleet_pb2.QueryUploadRequest) -> int:
        return await self._relay.count_received(assignment, request)

    @override
    def send_file(self, assignment: Assignment, request: fleet_pb2.DownloadRequest) -> AsyncIterator[bytes]:
        return self._relay.send(assignment, request)

    @override
    def begin(self) -> None:
        self._silence.begin()

    @override
    async def keep(self, jobs: Sequence[JobState], attempts: Collection[str]) -> None:
        open_attempts = [job.open_attempt.key for job in jobs if job.open_attempt is not None]
        await self._relay.keep(open_attempts, attempts)

    @override
    def on_stored(self, change: Change) -> None:
        if change.attempt is not None:
            self._relay.follow(change.attempt)

    @override
    async def close(self) -> None:
        await self._silence.close()
        await self._relay.close()

    @override
    def show(self, job: JobState) -> admin_pb2.Job:
        return admin_pb2.Job(num_rounds=job.spec.rounds, exchange=_show_exchange(job))

    @override
    def _read(self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest) -> steps.SiloMessage:
        message, limit = request.gossip, steps.MAX_MESSAGE_BYTES
        if message.HasField("report"):
            self._calls.count(assignment, message.ByteSize(), limit, _MAX_MESSAGES)
        try:
            return messages.to_record(message, steps.SiloMessage, limit)
        except ValueError as exc:
            raise self._refuse_report(exc) from exc

    @override
    async def _receive(self, client: ClientRecord, assignment: Assignment, message: steps.SiloMessage) -> None:
        """Validate a report, and submit it if the silo's round is not over."""
        key, report, done = assignment.key, message.report, message.done
        if report is None or not assignment.is_busy:
            return
        job = self._calls.job(key.job_id)
        try:
            self._check(client, job, key, report)
            events = steps.to_events(client.client_id, key.round, done.mixed_round, report)
        except (GossipError, SecureAggregationError) as exc:
            raise self._refuse_report(exc) from exc
        metrics: Mapping[str, float] = report.metrics if isinstance(report, steps.Announce) else {}
        await self._calls.runner.submit(SiloReported(key, client.client_id, tuple(events), metrics))
        if isinstance(report, steps.Announce):
            self._await_mean(client, job.job_id, report.model, done)

    def _refuse_report(self, exc: Exception) -> RefusedError:
        text = f"the silo's message is not accepted: {exc}"
        return RefusedError(Code.INVALID_REQUEST, validation.text(text, self._parts.limits.max_text))

    def _check(self, client: ClientRecord, job: JobState, key: AttemptKey, report: steps.SiloReport) -> None:
        """Raise `GossipError` or `SecureAggregationError` for a report that no honest silo sends."""
        match report:
            case steps.Announce():
                problem = claims.check_examples(report.model.num_examples)
                problem = problem or claims.check_metrics(report.metrics, self._parts.limits.metrics)
                if problem:
                    raise GossipError(problem)
                _check_files(report.model, _FILE_FACTOR * job.latest.size_bytes + _FILE_EXTRA)
                _check_relay_key(client, key, report.model)
            case steps.OfferKey():
                payload = ring.key_payload(key.job_id, key.round, report.attempt, client.client_id, report.key)
                if not is_signature(client.public_key, report.signature, payload):
                    raise GossipError("the key for the ring is not signed with the key with which the silo is enrolled")
            case _:
                pass

    def _await_mean(self, client: ClientRecord, job_id: str, model: Announcement, done: steps.Progress) -> None:
        """Ask the silos that have the mean for it, if one has announced a model without it and may need the relay."""
        job = self._calls.job(job_id)
        state, attempt = state_of(job), job.open_attempt
        found = steps.instruct(state, client.client_id, done, lambda name: steps.Contact(name, client.public_key))
        if not isinstance(found, steps.AdoptMean) or attempt is None:
            self._waiting.get(job_id, {}).pop(client.client_id, None)
            return
        own = steps.Contact(client.client_id, client.public_key, model.address, model.relay_key, model.relay_signature)
        self._waiting.setdefault(job_id, {})[client.client_id] = own
        self._calls.long_polls.advance(attempt.key)

    @override
    async def _find_input(
        self, job: JobState, assignment: Assignment, message: steps.SiloMessage
    ) -> tuple[fleet_pb2.StepResponse, bool]:
        if not (assignment.is_busy or assignment.state is AssignmentState.MERGED):
            return refuse_step(assignment.reason, assignment.text), True
        step = await self._make_step(job, assignment, message.done)
        is_new = step.known != message.known if message.known else not isinstance(step.instruction, steps.Wait)
        is_over = isinstance(step.instruction, steps.Leave)
        return fleet_pb2.StepResponse(gossip=messages.to_message(gossip_pb2.SiloStep, step)), is_new or is_over

    async def _make_step(self, job: JobState, assignment: Assignment, done: steps.Progress) -> steps.SiloStep:
        state, silo = state_of(job), assignment.client_id
        waiting = dict(self._waiting.get(job.job_id, {}))
        records = await self._calls.clients.find_all(sorted({*_list_silos(state), *waiting}))
        contacts = {name: _make_contact(record, state.announced.get(name)) for name, record in records.items()}
        instruction = steps.instruct(state, silo, done, contacts.__getitem__)
        is_over = not assignment.is_busy and not isinstance(instruction, steps.MixModels | steps.AdoptMean)
        receivers = {name: waiting.get(name, steps.Contact(name, records[name].public_key)) for name in records}
        revoked = {name for name, record in records.items() if record.revoked_unix_s is not None}
        return steps.SiloStep(
            instruction=steps.Leave() if is_over else instruction,
            known=f"{assignment.key.number}.{state.timer}.{len(waiting)}",
            round=assignment.key.round,
            remaining_s=max(assignment.deadline_at - self._calls.runner.now, 0.0) if assignment.is_busy else 0.0,
            model_receivers=tuple(
                contacts[name] for name in steps.list_model_receivers(state, silo) if name not in revoked
            ),
            mean_receivers=tuple(
                receivers[name] for name in steps.list_mean_receivers(state, silo, waiting) if name not in revoked
            ),
        )


def _mode(job: JobState) -> topology.Gossip:
    assert job.spec.gossip is not None
    return job.spec.gossip


def _show_exchange(job: JobState) -> admin_pb2.Exchange | None:
    """Return the exchanges of a job; None before it begins."""
    mode, found = _mode(job), find_state(job)
    if found is None:
        return None
    relative = found.consensus.relative
    return admin_pb2.Exchange(
        topology=mode.topology,
        kind=mode.exchange,
        num_silos=len(found.members),
        num_edges=len(found.edges),
        num_confirmed=found.confirmed,
        relative_distance=relative if math.isfinite(relative) else None,
        tolerance=mode.tolerance,
        num_unreachable=len(found.away),
        unreachable=sorted(found.away)[:MAX_NAMED],
        ring_attempt=found.attempt,
        excluded=sorted(found.excluded)[:MAX_NAMED],
    )


def _list_silos(state: GossipState) -> list[str]:
    """Return all silos that a step may name."""
    holders = state.average.holders if state.average is not None else ()
    return sorted({*state.announced, *state.members, *state.away, *holders})


def _make_contact(record: ClientRecord, model: Announcement | None) -> steps.Contact:
    """Return a silo as others see it, with its announcement of this round if there is one."""
    if model is None:
        return steps.Contact(record.client_id, record.public_key)
    return steps.Contact(record.client_id, record.public_key, model.address, model.relay_key, model.relay_signature)


def _check_files(model: Announcement, limit: int) -> None:
    """Raise `GossipError` for files that are no model of the job, or for something else than an address."""
    if model.address and not auth.is_address(model.address):
        raise GossipError(f"the address is {model.address[:100]!r}; expected host:port")
    digests = [model.digest, *((model.delta.digest, model.delta.base) if model.delta is not None else ())]
    if not all(map(files.is_digest, digests)):
        raise GossipError("a digest must be 64 lower-case hexadecimal digits")
    largest = max(model.size_bytes, model.delta.size_bytes if model.delta is not None else 0)
    if largest > limit:
        raise GossipError(f"the file has {largest} bytes; expected at most {limit} for this model")


def _check_relay_key(client: ClientRecord, key: AttemptKey, model: Announcement) -> None:
    """Raise `GossipError` or `SecureAggregationError` unless the silo's key for the relay is its own, if it has one."""
    if not model.relay_key and not model.relay_signature:
        return
    if len(model.relay_key) != KEY_BYTES or len(model.relay_signature) != SIGNATURE_BYTES:
        raise GossipError(f"the relay key has {len(model.relay_key)} bytes; expected {KEY_BYTES}, with a signature")
    member = RelayMember(client.client_id, client.public_key, RelayKey(model.relay_key, model.relay_signature))
    RelayExchange(*key).verify(member)
