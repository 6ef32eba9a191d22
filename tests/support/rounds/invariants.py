"""What must hold after every step, checked against nothing but the stored changes and the commands.

What must hold for the stored rows alone is checked by `fedplat.rounds.invariants`, as in a database; this module
compares them with the coordinator, its commands and its answers.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from fedplat.gossip.state import GossipPhase
from fedplat.modes import Buffered
from fedplat.rounds import (
    Assignment,
    Attempt,
    AttemptKey,
    Change,
    Coordinator,
    HistoryRow,
    JobState,
    ModelVersion,
    Participation,
    ParticipationHistory,
    Proposal,
    attempts,
    participations_of,
    rebuild_attempt,
)
from fedplat.rounds.commands import Abandon, Assign, Commit, Fold, Refuse, Restart
from fedplat.rounds.demand import Demand
from fedplat.rounds.events import ClientCheckedIn, Event, ServerRestarted, TimerFired, UpdateReported
from fedplat.rounds.protocols.base import training_of
from fedplat.rounds.protocols.gossip import state_of
from fedplat.rounds.records import NO_ASSIGNMENTS, SecureMessages
from fedplat.rounds.selection import make_demand
from fedplat.rounds.states import (
    BUSY_STATES,
    ENDED_JOBS,
    WORKING_PHASES,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    JobStatus,
    Reason,
)
from support.rounds import crews, stored
from support.rounds.clocks import Clocks
from support.rounds.secure_sets import SecureSets
from support.rounds.warm_starts import WarmStarts

_Name = tuple[AttemptKey, str]
_TAKEN_OUT = (Reason.REJECTED_OUTLIER, Reason.REVOKED)


@dataclasses.dataclass
class Snapshot:
    """All that a coordinator knows."""

    jobs: dict[str, JobState]
    waiting: dict[str, ClientCheckedIn]
    demands: dict[str, object]
    busy: dict[str, AttemptKey | None]


class Ledger:
    """A store that applies changes row by row, the clients that wait for an answer, and the checks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.jobs = dict(coordinator.jobs)
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.cohorts: dict[AttemptKey, dict[str, Assignment]] = {}
        self.busy: dict[str, AttemptKey] = {}
        self.unended: dict[str, dict[_Name, Assignment]] = {job_id: {} for job_id in self.jobs}
        self.open: dict[str, AttemptKey] = {}
        self.versions: dict[str, list[ModelVersion]] = {job_id: [job.latest] for job_id, job in self.jobs.items()}
        self.history: dict[str, list[HistoryRow]] = {job_id: [] for job_id in self.jobs}
        self.steps: dict[AttemptKey, list[HistoryRow]] = {}
        self.desk: dict[str, ClientCheckedIn] = {}
        self.tokens: set[str] = set()
        self.given: set[_Name] = set()
        self.folded: dict[AttemptKey, list[str]] = {}
        self.counted: dict[AttemptKey, dict[str, float]] = {}
        self.warm = WarmStarts()
        self.sets = SecureSets()
        self.acknowledged: dict[_Name, str] = {}
        self.clocks = Clocks()

    # --- storing ---

    def store(self, changes: Sequence[Change]) -> None:
        """Writes what a database would get, and nothing else."""
        for change in changes:
            job_id, before = change.job.job_id, self.jobs[change.job.job_id]
            assert before.revision == change.expected_revision == change.job.revision - 1
            # A job's row contains neither its attempt nor its clients: they come from their own rows below.
            row = structs.replace(change.job, carried_over=NO_ASSIGNMENTS)
            self.jobs[job_id] = structs.replace(row, attempt=before.attempt)
            if change.attempt is not None:
                key = change.attempt.key
                self.attempts[key] = structs.replace(change.attempt, assignments={})
                if change.attempt.is_open:
                    assert self.open.setdefault(job_id, key) == key, "two attempts are open"
                else:
                    self.open.pop(job_id, None)
                self.jobs[job_id] = structs.replace(row, attempt=self.attempts[key])
            for each in change.assignments:
                self._write(each)
            if change.attempt is not None and not change.attempt.is_open:
                # Messages have a table of their own, from which the end of an attempt removes them.
                cohort = self.cohorts.get(change.attempt.key, {})
                cohort |= {name: _without_messages(row) for name, row in cohort.items()}
            if change.version is not None:
                self.versions[job_id].append(change.version)
            self.history[job_id] += change.history
            for row in change.history:
                if row.entity in ("attempt", "assignment"):
                    self.steps.setdefault(AttemptKey(job_id, row.round, row.attempt), []).append(row)
            self._check_stored(change)
            self.clocks.follow(before, change)

    def _write(self, row: Assignment) -> None:
        """No client may be busy twice, not even within a batch; and no row may become another assignment's."""
        key = row.key
        before = self.cohorts.get(key, {}).get(row.client_id)
        assert before is None or before.base_version == row.base_version
        assert before is None or before.is_open or before == row, "an assignment that has ended must not change"
        if row.is_busy:
            assert self.busy.setdefault(row.client_id, key) == key
        elif self.busy.get(row.client_id) == key:
            del self.busy[row.client_id]
        cohort = self.cohorts.setdefault(key, {})
        cohort[row.client_id] = row
        if row.is_open:
            self.unended[key.job_id][key, row.client_id] = row
        else:
            self.unended[key.job_id].pop((key, row.client_id), None)

    def reload(self, coordinator: Coordinator, shift_s: float) -> None:
        """Gives a new coordinator what a database would: assignments on the new clock, and no waiting clients."""
        self.coordinator, self.desk = coordinator, {}
        for cohort in self.cohorts.values():
            cohort |= {name: _shifted(row, shift_s) for name, row in cohort.items()}
        for names in self.unended.values():
            names |= {(key, client_id): self.cohorts[key][client_id] for key, client_id in names}
        moments = {
            "opened_at": 0.0,
            "selection_ends_at": 0.0,
            "ended_at": None,
            "next_deadline": None,
            "closes_at": None,
            "step_ends_at": None,
            "num_awaited": 0,
            "last_report": 0,
        }
        self.attempts = {key: structs.replace(attempt, **moments) for key, attempt in self.attempts.items()}
        for job_id, job in self.jobs.items():
            last, carried = self.attempts[job.attempt.key] if job.attempt is not None else None, NO_ASSIGNMENTS
            if last is not None:
                last, carried = rebuild_attempt(structs.replace(last, counts={}), self._rows_of(last.key))
                self.attempts[last.key] = structs.replace(last, assignments={})
            bare = self.attempts[last.key] if last is not None else None
            self.jobs[job_id] = structs.replace(job, attempt=bare, resume_at=None)
            kind = training_of(job)
            kept = kind.read_state(json.loads(json.dumps(kind.write_state(job))), job.spec)
            assert job.spec.gossip is None or kept == job.protocol
            self.jobs[job_id] = structs.replace(self.jobs[job_id], protocol=kept)
            recalled = structs.replace(self.jobs[job_id], attempt=last, carried_over=carried)
            coordinator.add(recalled, self.participations(job_id))

    def participations(self, job_id: str) -> list[Participation]:
        """The participations in the training of a job, as a store would return them."""
        return [
            participation
            for key in sorted(self.cohorts)
            if key.job_id == job_id and self.attempts[key].kind is AttemptKind.TRAIN
            for participation in participations_of(self.cohorts[key].values())
        ]

    def _rows_of(self, last: AttemptKey) -> list[Assignment]:
        """The rows that a database is asked for: made in the attempt, taken into it, or still open."""
        found = {(last, client_id): row for client_id, row in self.cohorts.get(last, {}).items()}
        for key, cohort in self.cohorts.items():
            if key.job_id == last.job_id:
                found |= {(key, name): row for name, row in cohort.items() if row.is_open or row.folded_into == last}
        return list(found.values())

    # --- checking ---

    def snapshot(self) -> Snapshot:
        """The state that a rejected proposal must not change."""
        coordinator = self.coordinator
        return Snapshot(
            dict(coordinator.jobs),
            dict(coordinator.room.clients),
            dict(coordinator.room.demands),
            {client_id: coordinator.assignment_of(client_id) for client_id in (*self.busy, *self.desk)},
        )

    def check_nothing_happened(self, before: Snapshot) -> None:
        """After `reject` everything is as it was before."""
        assert self.snapshot() == before

    def check(self, events: Sequence[Event], proposal: Proposal, now: float, timers: Mapping[str, float]) -> None:
        """After `accept` every invariant holds."""
        for event in events:
            if isinstance(event, ServerRestarted):  # the partial aggregate was lost with the process
                self.folded = {key: folded for key, folded in self.folded.items() if key.job_id != event.job_id}
        self.warm.follow(events, proposal)
        self._check_answers(events, proposal)
        self._check_aggregation(proposal)
        self._check_acknowledged(events, proposal)
        self._check_fleet()
        self.sets.check(self.coordinator.jobs.values())
        for job_id, job in self.coordinator.jobs.items():
            self._check_rows(job)
            self._check_memory(job)
            assert timers.get(job_id) == attempts.next_deadline(job), f"{job_id} would sleep, or wake for nothing"
            if job.attempt is not None:
                self._check_attempt(job, job.attempt)
        for event in events:
            if isinstance(event, TimerFired) and event.job_id in self.coordinator.jobs:
                self._check_deadlines(self.coordinator.jobs[event.job_id], now)

    def _check_stored(self, change: Change) -> None:
        """The written rows satisfy every invariant of stored rows."""
        job = self.jobs[change.job.job_id]
        attempts = [attempt for key, attempt in self.attempts.items() if key.job_id == job.job_id]
        stored.require(stored.stored_job(job, self.versions[job.job_id], attempts, self.history[job.job_id]))
        if job.spec.selection.min_separation or job.spec.max_participations:
            stored.require(stored.participation_rounds(job, self.participations(job.job_id)))
        made = {(v.round, v.attempt): v for v in self.versions[job.job_id] if v.version and v.restored_from is None}
        for key in _changed_attempts(change):
            attempt, version = self.attempts[key], made.get(key[1:])
            stored.require(stored.stored_attempt(job, attempt, version, self._rows_of(key), self.steps[key]))

    def _check_answers(self, events: Sequence[Event], proposal: Proposal) -> None:
        """Every waiting client is in the room or is answered once; work goes only to clients that may have it."""
        self.desk |= {event.client_id: event for event in events if isinstance(event, ClientCheckedIn)}
        answers = [command for command in proposal.commands if isinstance(command, Assign | Refuse)]
        assert max(Counter(answer.client_id for answer in answers).values(), default=1) == 1
        for answer in answers:
            client = self.desk.pop(answer.client_id)
            if isinstance(answer, Assign):
                self._check_assign(answer, client)
        assert self.coordinator.room.clients == self.desk

    def _check_assign(self, command: Assign, client: ClientCheckedIn) -> None:
        name = (command.key, command.client_id)
        assert command.token not in self.tokens
        spec = self.jobs[command.key.job_id].spec
        assert client.population == spec.population
        assert self.cohorts[command.key][command.client_id].token_hash == command.token.encode()
        if name not in self.given:  # a client that lost its reply gets its work again, whatever it reports now
            evaluation = spec.evaluation.clients
            if command.kind is AttemptKind.TRAIN:
                assert spec.trainer in client.trainers
            else:
                assert evaluation is not None
                assert evaluation.evaluator in client.evaluators
            assert spec.selection.where in ("", f"region == '{client.labels.get('region')}'")
        self.tokens.add(command.token)
        self.given.add(name)

    def _check_aggregation(self, proposal: Proposal) -> None:
        """Updates are folded once, with their weights; nothing is committed below the minimum."""
        for command in proposal.commands:
            if isinstance(command, Fold):
                folded = self.folded.setdefault(command.key, [])
                client_id = command.assignment.client_id
                assert client_id not in folded
                folded.append(client_id)
                self.counted.setdefault(command.key, {})[client_id] = command.contribution.weight
                self._check_fold(command)
            elif isinstance(command, Restart):
                self.folded[command.key] = []
                assert self.jobs[command.key.job_id].spec.durability == "spool", "updates cannot be folded again"
            elif isinstance(command, Commit):
                num_folded = len(self.folded.get(command.key, ()))
                assert command.num_updates == num_folded >= self.attempts[command.key].minimum
                if self.jobs[command.key.job_id].spec.buffered is not None:
                    assert command.num_updates <= self.attempts[command.key].goal
            elif isinstance(command, Abandon):
                assert self.attempts[command.key].phase is AttemptPhase.ABANDONED
        for change in proposal.changes:
            if change.version is not None and change.version.is_held_by_clients:
                assert change.job.spec.gossip is not None
            elif change.version is not None and change.version.restored_from is None:
                assert change.attempt is not None
                merged = [a for a in change.attempt.assignments.values() if a.state is AssignmentState.MERGED]
                merged.sort(key=lambda each: each.report_number or 0)
                assert self._list_folded(change.job, change.attempt) == [each.client_id for each in merged]
                assert all(each.folded_into == change.attempt.key for each in merged)
                self._check_influence(change.job, merged)

    def _list_folded(self, job: JobState, attempt: Attempt) -> list[str]:
        """Return whose updates a version has; a Flower app may refuse what was folded."""
        refused = {AssignmentState.REJECTED} if job.spec.flower is not None else set[AssignmentState]()
        folded = self.folded.get(attempt.key, [])
        return [each for each in folded if attempt.assignments[each].state not in refused]

    def _check_influence(self, job: JobState, merged: Sequence[Assignment]) -> None:
        """A version's updates counted with the weights in their rows; no weight and no norm is far above the median."""
        spec = job.spec
        if merged and merged[0].folded_into is not None:
            counted = self.counted[merged[0].folded_into]
            assert {each.client_id: counted[each.client_id] for each in merged} == {
                each.client_id: each.weight for each in merged
            }
        if spec.durability == "memory" or len(merged) < 3:
            return
        norms = sorted(each.norm for each in merged if each.norm is not None)
        if spec.outlier_factor and len(norms) >= 3 and norms[(len(norms) - 1) // 2]:
            assert norms[-1] <= spec.outlier_factor * norms[(len(norms) - 1) // 2]
        if spec.max_weight_factor:
            claims = sorted(min(each.num_examples, spec.updates.max_examples) for each in merged)
            most = spec.max_weight_factor * claims[(len(claims) - 1) // 2]
            assert all(each.weight == spec.weight(each.num_examples, each.staleness, most) for each in merged)

    def _check_fold(self, command: Fold) -> None:
        assigned_in, client_id = command.assignment
        found, attempt = self.cohorts[assigned_in][client_id], self.attempts[command.key]
        spec = self.jobs[command.key.job_id].spec
        assert found.digest == command.digest
        assert found.state not in BUSY_STATES
        assert found.folded_into == command.key, "an update is folded into two versions"
        staleness = attempt.base_version - found.base_version
        assert command.base_version == found.base_version
        assert command.contribution.staleness == found.staleness == staleness >= 0
        factor = (1 + staleness) ** -0.5 if isinstance(spec.mode, Buffered) else 1.0
        weight, most = command.contribution.weight, factor * spec.weight(found.num_examples)
        most = 1.0 if found.secure is not None else most
        assert weight == most if spec.max_weight_factor == 0.0 else weight <= most
        if spec.buffered is None:
            assert (staleness, assigned_in) == (0, command.key)
        elif spec.buffered.max_staleness is not None:
            assert staleness <= spec.buffered.max_staleness

    def _check_acknowledged(self, events: Sequence[Event], proposal: Proposal) -> None:
        """An accepted report does not change until it is merged, or ends for another reason."""
        for event, verdict in zip(events, proposal.verdicts, strict=True):
            if isinstance(event, UpdateReported) and verdict.accepted:
                assert self.acknowledged.setdefault((event.key, event.client_id), event.digest) == event.digest
        for (key, client_id), digest in self.acknowledged.items():
            row = self.cohorts[key][client_id]
            assert row.digest == digest
            if row.state is AssignmentState.DROPPED:
                self._check_dropped(row)
            elif row.state is AssignmentState.REJECTED:
                by_app = (Reason.REJECTED_SCHEMA,) if self.jobs[key.job_id].spec.flower is not None else ()
                assert row.reason in (Reason.REJECTED_OUTLIER, Reason.REJECTED_MESSAGE, *by_app)
                assert row.text
            else:
                assert row.state in (AssignmentState.REPORTED, AssignmentState.MERGED)

    def _check_dropped(self, row: Assignment) -> None:
        spec = self.jobs[row.key.job_id].spec
        assert row.reason is not None
        if row.reason is Reason.REVOKED:
            return
        if row.reason is Reason.TOO_STALE:
            assert spec.buffered is not None
            assert (spec.buffered.max_staleness is None, row.folded_into) == (False, None)
        elif spec.durability == "spool" and row.folded_into is not None:
            attempt = self.attempts[row.folded_into]
            assert attempt.phase is AttemptPhase.ABANDONED
            assert "restarted" not in attempt.reason
        elif spec.buffered is None:
            assert self.attempts[row.key].phase is AttemptPhase.ABANDONED

    def _check_fleet(self) -> None:
        """Every busy client works for one attempt, does not wait, and the coordinator knows it."""
        assert len(self.busy) == self.coordinator.num_busy
        for client_id, key in self.busy.items():
            assert self.coordinator.assignment_of(client_id) == key
            assert client_id not in self.coordinator.room.clients
        room = self.coordinator.room
        waiting = Counter(client.population for client in room.clients.values())
        assert all(room.num_waiting(population) == waiting[population] for population in {*waiting, "demo"})

    def _check_memory(self, job: JobState) -> None:
        """The participation history, and which clients may be drawn, follow from what is stored."""
        job_id, room = job.job_id, self.coordinator.room
        memory = self.coordinator.histories.get(job_id)
        if job.status in ENDED_JOBS or not job.spec.remembers:
            assert memory is None
        else:
            recalled = ParticipationHistory.recall(job.spec, self.participations(job_id))
            assert memory is not None
            assert recalled is not None
            assert (memory.clients, memory.utilities) == (recalled.clients, recalled.utilities)
        demand = room.demands.get(job_id)
        if demand is None:
            return
        accepted, rests = {c.client_id for c in room.clients.values() if demand.accepts(c)}, set[str]()
        if demand.kind is AttemptKind.TRAIN:
            accepted = {each for each in accepted if not room.has_declined(job_id, room.clients[each])}
            rest = range(demand.key.round - job.spec.selection.min_separation, demand.key.round)
            now = demand.key[1:] if rest else ()
            rests = {p.client_id for p in self.participations(job_id) if p.round in rest or (p.round, p.attempt) == now}
        spent, out = self._share(demand) if job.spec.max_participations else (set[str](), set[str]())
        assert room.num_eligible(job_id) == len(accepted - rests - out - set(demand.excluded))
        assert room.num_resting(job_id) == len((accepted & rests) - spent)
        assert room.num_spent(job_id) == len(accepted & spent & (rests | out))

    def _share(self, demand: Demand) -> tuple[set[str], set[str]]:
        """The clients that used up their limit, and those of them that may not be drawn for this attempt."""
        rounds: dict[str, set[int]] = {}
        last: dict[str, tuple[int, int]] = {}
        for p in self.participations(demand.key.job_id):
            rounds.setdefault(p.client_id, set()).add(p.round)
            last[p.client_id] = max(last.get(p.client_id, (0, 0)), (p.round, p.attempt))
        most = self.jobs[demand.key.job_id].spec.max_participations
        spent = {name for name, each in rounds.items() if len(each) >= most}
        return spent, {name for name in spent if last[name][0] < demand.key.round or last[name] == demand.key[1:]}

    def _check_rows(self, job: JobState) -> None:
        """The rows agree with the coordinator."""
        attempt = job.attempt
        bare = structs.replace(attempt, assignments={}) if attempt is not None else None
        assert self.jobs[job.job_id] == structs.replace(job, attempt=bare, carried_over=NO_ASSIGNMENTS)
        assert self.versions[job.job_id][-1] == job.latest
        self.warm.check(job, self.versions[job.job_id])
        assert self.open.get(job.job_id) == (job.open_attempt.key if job.open_attempt is not None else None)
        assert self.coordinator.room.demands.get(job.job_id) == make_demand(job)
        if job.status is not JobStatus.RUNNING and job.open_attempt is not None:
            assert (job.status, job.open_attempt.phase) == (JobStatus.PAUSED, AttemptPhase.COMMITTING)

    def _check_attempt(self, job: JobState, attempt: Attempt) -> None:
        for crew in job.assignment_sets:
            crews.check_crew(crew, self.cohorts)
        working = [row for crew in job.assignment_sets for row in crew.assignments.values() if row.is_open]
        assert {(row.key, row.client_id): row for row in working} == self.unended[job.job_id], "an assignment got lost"
        assert len(working) == len(self.unended[job.job_id]), "an assignment is there twice"
        if job.spec.buffered is None:
            assert dict(attempt.assignments) == self.cohorts.get(attempt.key, {})
            assert not job.carried_over.assignments
        else:
            crews.check_buffer(job, list(self.unended[job.job_id].values()), self.coordinator.room)
        if job.spec.gossip is not None:
            self._check_exchange(job, attempt)
        elif attempt.num_busy or (attempt.phase is AttemptPhase.COLLECTING and job.spec.buffered is None):
            waits = attempt.num_busy or attempt.closes_at is not None or attempts.selects(job)
            assert waits, "no client is left to wait for"
            secured = attempt.kind is AttemptKind.TRAIN and job.spec.secure_aggregation is not None
            assert attempt.phase in (WORKING_PHASES if secured else (AttemptPhase.COLLECTING,))
        if not attempt.is_open:
            assert attempt.num_reported == 0, "an accepted report was not ended"
        if attempt.is_open and attempt.kind is AttemptKind.TRAIN:
            dropped = {name for name, row in attempt.assignments.items() if row.reason in _TAKEN_OUT}
            folded = [name for name in self.folded.get(attempt.key, []) if name not in dropped]
            assert folded == [each.client_id for each in attempt.reported]

    def _check_exchange(self, job: JobState, attempt: Attempt) -> None:
        """A round of a decentralised job has a deadline, and the silos that announced a model are those at work."""
        state = state_of(job)
        assert attempt.key.round == state.round
        if not attempt.is_open:
            return
        assert attempt.step_ends_at is not None
        assert all(each.deadline_at == attempt.step_ends_at for each in attempt.busy)
        for each in attempt.busy:
            has_announced = each.client_id in state.announced
            assert each.state is (AssignmentState.ADVERTISED if has_announced else AssignmentState.TRAINING)
            assert has_announced or state.phase is GossipPhase.ANNOUNCING

    def _check_deadlines(self, job: JobState, now: float) -> None:
        """Once the timer has fired nothing is open past its deadline."""
        attempt = job.open_attempt
        if attempt is not None and attempt.awaits_clients and job.spec.gossip is None:
            assert attempt.selection_ends_at > now
        if attempt is not None and attempt.phase is AttemptPhase.COLLECTING and attempt.closes_at is not None:
            assert attempt.closes_at > now
            assert all(each.deadline_at <= attempt.closes_at for each in attempt.busy)
        assert all(each.deadline_at > now for crew in job.assignment_sets for each in crew.busy)


def _changed_attempts(change: Change) -> set[AttemptKey]:
    named = {key for row in change.assignments for key in (row.key, row.folded_into) if key is not None}
    return named | ({change.attempt.key} if change.attempt is not None else set())


def _without_messages(row: Assignment) -> Assignment:
    if row.secure is None:
        return row
    return structs.replace(row, secure=SecureMessages(row.secure.group, row.secure.position))


def _shifted(row: Assignment, shift_s: float) -> Assignment:
    return structs.replace(row, assigned_at=row.assigned_at + shift_s, deadline_at=row.deadline_at + shift_s)
