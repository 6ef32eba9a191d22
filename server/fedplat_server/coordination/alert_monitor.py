"""The facts from which alerts follow, and the events of alerts: a background task of the leader.

Evaluation is cheap: it reads memory and asks the operating system for the free space of one disk. Only the privacy
arithmetic is slow. It runs in the accountant's thread, at most once a minute, for jobs and budgets that have changed.

An evaluation follows from the state of the moment, so after a restart the alerts that the database still has as raised
are compared with the first evaluation: no event is repeated, and an alert that ended meanwhile gets its event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fedplat.rounds import AttemptKey, Change, Coordinator, JobState, privacy_rules, states
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat_server import errors, instruments, logs
from fedplat_server.coordination import alerts
from fedplat_server.coordination.job_checks import Accountant, epsilon
from fedplat_server.database.records import Account, AttemptFilter, AttemptRecord, JobRecord, Population
from fedplat_server.database.store import Store
from fedplat_server.records import events
from fedplat_server.records.events import Alert, EventRow
from fedplat_server.storage.object_store import StoreHealth

EPSILON_INTERVAL_S = 60.0
_WORKING = frozenset(states.AttemptPhase) - {states.AttemptPhase.SELECTING, states.AttemptPhase.ABANDONED}
"""Phases of an attempt that clients have worked for."""


@dataclasses.dataclass
class _JobTimes:
    """The last commit of a job, the last work of a client for it, and its last rounds. Moments are on `now`."""

    idle_since: float
    waiting_since: float
    rounds: deque[alerts.RoundFacts] = dataclasses.field(default_factory=lambda: deque(maxlen=alerts.LATE_ROUNDS))


@dataclasses.dataclass(frozen=True, slots=True)
class DiskSpace:
    """The space of the disk of a folder, in bytes; both are 0 if the operating system does not tell."""

    free_bytes: int = 0
    total_bytes: int = 0

    @classmethod
    def of(cls, folder: Path) -> DiskSpace:
        """Return the space of a folder's disk."""
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            return cls()
        return cls(usage.free, usage.total)

    @property
    def is_scarce(self) -> bool:
        """True if the disk is nearly full."""
        return alerts.is_scarce(self.free_bytes, self.total_bytes)


class AlertMonitor:
    """The alerts of a leading daemon. `now` is the clock of the coordinator's times.

    `find` returns a job with the problem of its plugins.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        find: Callable[[str], JobRecord],
        accountant: Accountant,
        now: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._find = find
        self._accountant = accountant
        self._now = now
        self._days_left: Callable[[], float | None] = lambda: None
        self._renewal = ""
        self._full_writes = instruments.FullWrites()
        self._prune_options = ""
        self._is_alone = False
        self._health: StoreHealth | None = None
        self._jobs: dict[str, _JobTimes] = {}
        self._failed_unix_s: dict[str, float] = {}
        self._spent: dict[str, alerts.Spent] = {}
        self._budgets: dict[str, alerts.Spent] = {}
        self._seen = alerts.AlertBook()
        self.failing_webhooks: Sequence[alerts.WebhookFacts] = ()
        self._task: asyncio.Task[None] | None = None

    def watch_certificate(self, days_left: Callable[[], float], renewal: str) -> None:
        """Include the server's certificate: the days until it expires, and the command that renews it."""
        self._days_left, self._renewal = days_left, renewal

    def watch_disk(self, full_writes: instruments.FullWrites, prune_options: str, *, is_alone: bool) -> None:
        """Include the writes that failed since the start of the daemon, also before it led."""
        self._full_writes, self._prune_options, self._is_alone = full_writes, prune_options, is_alone

    def watch_store(self, health: StoreHealth) -> None:
        """Include the object store of the spool."""
        self._health = health

    async def restore(self, store: Store) -> None:
        """Read the last rounds of open jobs, and the times at which jobs failed."""
        failed: list[AttemptKey] = []
        for job in self._coordinator.jobs.values():
            if job.status is states.JobStatus.FAILED and job.attempt is not None:
                failed.append(job.attempt.key)
            elif job.status not in states.ENDED_JOBS:
                await self._restore_job(store, job)
        for key, attempt in (await store.jobs.find_attempts(failed)).items():
            if attempt.ended_unix_s is not None:
                self._failed_unix_s[key.job_id] = attempt.ended_unix_s

    async def _restore_job(self, store: Store, job: JobState) -> None:
        which = AttemptFilter(job.job_id, newest_first=True)
        last = await store.jobs.list_attempts(which, limit=2 * alerts.LATE_ROUNDS)  # half of them may be evaluations
        committed = [each for each in last if _is_round(each) and each.ended_unix_s is not None]
        book = self._book(job.job_id)
        book.rounds.extend(map(_round_facts, reversed(committed[: alerts.LATE_ROUNDS])))

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Update the facts after stored changes."""
        now = self._now()
        for change in changes:
            job, attempt = change.job, change.attempt
            if job.status is states.JobStatus.FAILED:
                self._failed_unix_s.setdefault(job.job_id, time.time())
            if job.status in states.ENDED_JOBS:
                self._jobs.pop(job.job_id, None)
                continue
            book = self._book(job.job_id)
            if any(row.entity == "job" for row in change.history):  # it was started, paused or resumed
                book.idle_since = book.waiting_since = now
            if attempt is None:
                continue
            if attempt.phase in _WORKING:
                book.waiting_since = now
            if attempt.phase is states.AttemptPhase.COMMITTED and attempt.kind in states.MAKE_VERSIONS:
                began, book.idle_since = book.idle_since, now
                if protocol_of(job, attempt.kind).folds:
                    counts = attempt.counts
                    seconds = now - (attempt.opened_at or began)  # after a restart the time of its opening is not known
                    late = counts.get(states.AssignmentState.LATE, 0)
                    book.rounds.append(alerts.RoundFacts(seconds, sum(counts.values()), late))

    def _book(self, job_id: str) -> _JobTimes:
        if job_id not in self._jobs:
            self._jobs[job_id] = _JobTimes(self._now(), self._now())
        return self._jobs[job_id]

    def evaluate(self, disk: DiskSpace) -> Sequence[tuple[Alert, float]]:
        """Return the present alerts, the most severe first, each with the time since which it lasts."""
        self._seen.update(self._find_alerts(disk), time.time())
        return self._seen.current

    def restore_alerts(self, raised: Iterable[tuple[alerts.Alert, float]]) -> None:
        """Continue with alerts that were raised before a restart, each with the time since which it lasts."""
        self._seen.load(raised)

    def _find_alerts(self, disk: DiskSpace) -> list[Alert]:
        days_left, full_unix_s = self._days_left(), self._full_writes.last_unix_s
        server = alerts.ServerFacts(
            certificate_s=None if days_left is None else days_left * alerts.DAY_S,
            disk_free_bytes=disk.free_bytes,
            disk_total_bytes=disk.total_bytes,
            full_s=None if full_unix_s is None else time.time() - full_unix_s,
            num_full=self._full_writes.num,
            budgets=self._budgets,
            webhooks=self.failing_webhooks,
            store=self._store_facts(),
            renewal=self._renewal,
            prune=f"fedplat-server prune{self._prune_options}",
            is_alone=self._is_alone,
        )
        jobs = self._coordinator.jobs.values()
        working = Counter[str]()
        for job in jobs:
            working[job.spec.population] += job.num_busy
        return alerts.evaluate(server, (self._facts(job, working) for job in jobs if self._concerns(job)))

    def _store_facts(self) -> alerts.StoreFacts | None:
        problem = self._health.problem if self._health is not None else None
        if self._health is None or problem is None:
            return None
        now = time.time()
        return alerts.StoreFacts(self._health.url, problem.text, now - problem.since_unix_s, now - problem.last_unix_s)

    def _concerns(self, job: JobState) -> bool:
        return job.status in (states.JobStatus.RUNNING, states.JobStatus.PAUSED) or job.job_id in self._failed_unix_s

    def _facts(self, job: JobState, working: Mapping[str, int]) -> alerts.JobFacts:
        book, now, spec = self._book(job.job_id), self._now(), job.spec
        attempt, room = job.open_attempt, self._coordinator.room
        has_failed = job.status is states.JobStatus.FAILED
        is_alone = attempt is not None and attempt.kind not in states.HAVE_CLIENTS
        awaits_clients = not is_alone and (attempt is None or attempt.awaits_clients)
        num_waiting = room.num_waiting(spec.population)
        is_selecting = job.job_id in room.demands
        num_eligible = room.num_eligible(job.job_id) if is_selecting else num_waiting
        deadlines = spec.deadlines
        return alerts.JobFacts(
            job_id=job.job_id,
            name=spec.name,
            population=spec.population,
            status=job.status,
            reason=job.reason or (job.attempt.reason if job.attempt is not None else ""),
            needed=attempt.goal if attempt is not None else spec.selection.goal,
            num_connected=num_waiting + working[spec.population],
            num_available=num_eligible + job.num_busy,
            waiting_s=now - book.waiting_since if awaits_clients else 0.0,
            idle_s=0.0 if is_alone else now - book.idle_since,
            longest_s=deadlines.selection_s + deadlines.training_s + deadlines.upload_s,
            rounds=tuple(book.rounds),
            failures=job.failures,
            problem="" if has_failed else self._find(job.job_id).problem,
            spent=self._spent.get(job.job_id),
            exhausted=privacy_rules.describe_spent_budget(job) if job.round < spec.rounds else "",
            failed_s=time.time() - self._failed_unix_s[job.job_id] if has_failed else None,
            option=training_of(job).client_option,
        )

    def begin(self, store: Store) -> None:
        """Start to compute the spent privacy budgets once a minute."""
        self._task = asyncio.create_task(self._refresh_epsilons(store), name="spent budgets")

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def update_epsilons(self, store: Store) -> None:
        """Compute how much of the privacy budgets of jobs and populations is spent. May take seconds of arithmetic."""
        populations = await store.ledger.load_populations()
        spent = [
            (account.job_id, self._job_spent(account))
            for population in populations
            for account in population.accounts
            if account.is_private and not account.has_ended
        ]
        self._spent = {job_id: value for job_id, pending in spent if (value := await pending) is not None}
        budgets = [(population.name, await self._population_spent(population)) for population in populations]
        self._budgets = {name: value for name, value in budgets if value is not None}

    async def _job_spent(self, account: Account) -> alerts.Spent | None:
        options = self._coordinator.jobs[account.job_id].spec.privacy
        if options is None or options.epsilon is None or not account.released:
            return None
        return alerts.Spent(await self._accountant.run(epsilon, account.released, options.delta), options.epsilon)

    async def _population_spent(self, population: Population) -> alerts.Spent | None:
        budget = population.budget
        if budget is None or not population.charges:
            return None
        return alerts.Spent(await self._accountant.run(epsilon, population.charges, budget.delta), budget.epsilon)

    async def _refresh_epsilons(self, store: Store) -> None:
        while True:
            await asyncio.sleep(EPSILON_INTERVAL_S)
            with contextlib.suppress(errors.LeadershipLostError):
                try:
                    if any(disclosure_of(job.spec).is_charged for job in self._coordinator.jobs.values()):
                        await self.update_epsilons(store)
                except errors.StoreError as exc:
                    logs.get().warning("the spent privacy budgets could not be read", error=str(exc))


def _is_round(record: AttemptRecord) -> bool:
    return record.attempt.kind in states.HAVE_UPDATES and record.attempt.phase is states.AttemptPhase.COMMITTED


def _round_facts(record: AttemptRecord) -> alerts.RoundFacts:
    assert record.ended_unix_s is not None
    seconds, counts = record.ended_unix_s - record.opened_unix_s, record.tally.counts
    return alerts.RoundFacts(seconds, sum(counts.values()), counts.get(states.AssignmentState.LATE, 0))


ALERT_INTERVAL_S = 10.0
WEBHOOK_FAILING_S = 3600.0
"""The time for which a webhook must fail: receivers are restarted now and then."""


class AlertRecorder:
    """The background task."""

    def __init__(self, monitor: AlertMonitor, store: Store, data_dir: Path) -> None:
        self._monitor = monitor
        self._store = store
        self._data_dir = data_dir
        self._recorded = alerts.AlertBook()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Read the raised alerts, and start the task."""
        raised = [(_restore(event), event.unix_s) for event in await self._store.events.list_raised_alerts()]
        self._recorded.load(raised)
        self._monitor.restore_alerts(raised)
        self._task = asyncio.create_task(self._run(), name="alerts")

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def record(self) -> None:
        """Evaluate the alerts, and store the events of the changes since the last call."""
        now = time.time()
        failing = await self._store.webhooks.find_failing_webhooks(now - WEBHOOK_FAILING_S)
        self._monitor.failing_webhooks = [
            alerts.WebhookFacts(
                webhook.webhook_id,
                events.parse_url(webhook.url).origin,
                webhook.last_result,
                now - (webhook.failing_since_unix_s or now),
            )
            for webhook in failing
        ]
        disk = await asyncio.to_thread(DiskSpace.of, self._data_dir)
        found = [alert for alert, _ in self._monitor.evaluate(disk)]
        changes = self._recorded.compare(found)
        await self._store.events.record_alerts(changes.raised, changes.ended)
        self._recorded.update(found, now)  # only now: after an error they are still to be stored

    async def _run(self) -> None:
        problem = ""
        while True:
            await asyncio.sleep(ALERT_INTERVAL_S)
            try:
                await self.record()
                problem = ""
            except errors.LeadershipLostError:
                return
            except errors.StoreError as exc:
                if str(exc) != problem:  # it may last for hours
                    problem = str(exc)
                    logs.get().warning("changed alerts could not be stored; trying again", error=problem)


def _restore(event: EventRow) -> alerts.Alert:
    # Only its identity and its text matter: the next evaluation makes it anew, or ends it.
    return alerts.Alert(event.subject, alerts.Severity.WARNING, event.text, "", event.job_id, event.population)
