"""Alerts: conditions that need the attention of an operator. Pure: facts in, alerts out; times are arguments.

Read `JOB_RULES` and `SERVER_RULES` first: each rule is one function, which returns an alert or None. An alert ends when
its rule returns None. A rule must not raise an alert for a state that a healthy server passes through, such as the
seconds in which a fleet returns after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedplat.rounds.states import REASON_TEXTS, JobStatus, Reason
from fedplat.texts import duration, format_count, shorten
from fedplat_server.records.events import Alert, Severity

DAY_S = 86_400.0
STALLED_FACTOR = 3.0
MIN_STALLED_S = 300.0
"""A job is stalled after `STALLED_FACTOR` times its usual round, but not before this time."""
AWAY_S = 60.0
"""The time for which a job must have too few clients: after a restart a fleet needs up to half a minute to return."""
LATE_RATIO = 0.3
LATE_ROUNDS = 5
MIN_FAILURES = 3
BUDGET_RATIO = 0.9
CERTIFICATE_S = 14 * DAY_S
DISK_RATIO = 0.1
DISK_BYTES = 2**30
FULL_S = 3600.0
FAILED_S = DAY_S
_MAX_REASON_BYTES = 600
_PAUSED_BY_OPERATOR = REASON_TEXTS[Reason.JOB_PAUSED]


class RoundFacts(NamedTuple):
    """A committed round: how long its attempt took, its assignments, and those of them that were late."""

    seconds: float
    num_assigned: int
    num_late: int


class Spent(NamedTuple):
    """The privacy loss of releases, and its budget."""

    epsilon: float
    budget: float


@dataclasses.dataclass(frozen=True, slots=True)
class JobFacts:
    """An open job, or one that has failed.

    `num_connected` clients of the population wait or work, and `num_available` of them may work for this job or do so;
    `needed` is the goal of its rounds. No client has worked for it for `waiting_s`; it has committed no round for
    `idle_s`, and `longest_s` is the longest time that a round may take. `rounds` are the last committed ones, and
    `failures` the attempts abandoned in a row. `problem` is that of its plugins, `exhausted` why its privacy budget
    allows no further round, and `failed_s` the time since it failed. `option` is one that its clients need.
    """

    job_id: str
    name: str
    population: str
    status: JobStatus
    reason: str = ""
    needed: int = 0
    num_connected: int = 0
    num_available: int = 0
    waiting_s: float = 0.0
    idle_s: float = 0.0
    longest_s: float = 0.0
    rounds: Sequence[RoundFacts] = ()
    failures: int = 0
    problem: str = ""
    spent: Spent | None = None
    exhausted: str = ""
    failed_s: float | None = None
    option: str = ""


class WebhookFacts(NamedTuple):
    """A webhook that accepts no events: its receiver, the result of the last attempt, and for how long it fails."""

    webhook_id: str
    receiver: str
    result: str
    failing_s: float


class StoreFacts(NamedTuple):
    """An object store whose last operation failed: why, for how long they fail, and the time since the last one."""

    url: str
    problem: str
    failing_s: float
    last_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server itself. None: not known, or it does not apply.

    `certificate_s` is the time until the certificate expires, `full_s` the time since a write failed because storage
    was full; `budgets` are the populations with a budget, `webhooks` those that accept no events; `store` is an object
    store that fails. `renewal` is the command that renews the certificate ("": its files are the owner's own), and
    `prune` the one that removes old data, for which a daemon on SQLite must be stopped (`is_alone`).
    """

    certificate_s: float | None = None
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    full_s: float | None = None
    num_full: int = 0
    budgets: Mapping[str, Spent] = dataclasses.field(default_factory=dict[str, Spent])
    webhooks: Sequence[WebhookFacts] = ()
    store: StoreFacts | None = None
    renewal: str = "fedplat-server certificates renew"
    prune: str = "fedplat-server prune"
    is_alone: bool = False


def evaluate(server: ServerFacts, jobs: Iterable[JobFacts]) -> list[Alert]:
    """Return all alerts, the most severe first, then by name, population and job."""
    found = [alert for server_rule in SERVER_RULES if (alert := server_rule(server)) is not None]
    found += [_population_epsilon(name, spent) for name, spent in server.budgets.items() if _is_high(spent)]
    found += [alert for job in jobs for job_rule in JOB_RULES if (alert := job_rule(job)) is not None]
    return sorted(found, key=lambda alert: (-alert.severity, alert.name, alert.population, alert.job_id))


def usual_round_s(job: JobFacts) -> float:
    """Return the median time of the last rounds; of a job without rounds, the longest time that a round may take."""
    durations = sorted(each.seconds for each in job.rounds)
    if not durations:
        return job.longest_s
    middle = len(durations) // 2
    return durations[middle] if len(durations) % 2 else (durations[middle - 1] + durations[middle]) / 2


def _check_stalled(job: JobFacts) -> Alert | None:
    usual_s = usual_round_s(job)
    if job.status is not JobStatus.RUNNING or job.idle_s <= max(STALLED_FACTOR * usual_s, MIN_STALLED_S):
        return None
    expected = "its rounds usually take" if job.rounds else "a round may take"
    text = f"Job {job.name} has committed no round for {duration(job.idle_s)}; {expected} {duration(usual_s)}"
    if not job.num_connected:
        return _of_job(job, "job_stalled", Severity.CRITICAL, f"{text}, and {_no_client(job)}.", _start_clients(job))
    reason = f": {_short(job.reason)}" if job.reason else ""
    remedy = (
        f"Look at the reasons of its last attempts (fedplat job rounds --all {job.job_id}) and at the clients' logs."
    )
    return _of_job(job, "job_stalled", Severity.CRITICAL, f"{text}{reason}.", remedy)


def _check_too_few_clients(job: JobFacts) -> Alert | None:
    if job.status is not JobStatus.RUNNING or job.waiting_s < AWAY_S or job.num_available >= job.needed:
        return None
    if not job.num_connected:
        text = f"Job {job.name} waits for {format_count(job.needed, 'client')}, but {_no_client(job)}."
        return _of_job(job, "too_few_clients", Severity.CRITICAL, text, _start_clients(job))
    text = (
        f"Job {job.name} waits for {format_count(job.needed, 'client')}, but only {job.num_available} of the "
        f"{job.num_connected} connected clients of population {job.population} may work for it"
    )
    text += f": {_short(job.reason)}." if job.reason else "."
    option = f" with {job.option}, which this job needs" if job.option else ""
    remedy = (
        f"Start more clients{option}, or compare the job's [selection] (where, goal, min_separation) and its trainer "
        f"with the clients (fedplat client list --output wide --population {job.population})."
    )
    return _of_job(job, "too_few_clients", Severity.WARNING, text, remedy)


def _check_many_late(job: JobFacts) -> Alert | None:
    last = job.rounds[-LATE_ROUNDS:]
    assigned, late = sum(each.num_assigned for each in last), sum(each.num_late for each in last)
    if job.status is not JobStatus.RUNNING or len(last) < LATE_ROUNDS or late <= LATE_RATIO * assigned:
        return None
    text = (
        f"In the last {len(last)} rounds of job {job.name}, {late} of {assigned} clients ({late / assigned:.0%}) "
        "missed the deadline."
    )
    remedy = (
        "Give the clients of the next job more time ([deadlines] training_s, upload_s) or less work, or select faster "
        "ones ([selection] where)."
    )
    return _of_job(job, "many_late", Severity.WARNING, text, remedy)


def _check_attempts_failing(job: JobFacts) -> Alert | None:
    if job.status is not JobStatus.RUNNING or job.failures < MIN_FAILURES:
        return None
    text = f"The last {job.failures} attempts of job {job.name} were abandoned: {_short(job.reason)}."
    remedy = (
        f"Remove the cause, or pause the job until then (fedplat job pause {job.job_id}): it is tried again and again."
    )
    return _of_job(job, "attempts_failing", Severity.WARNING, text, remedy)


def _check_epsilon_high(job: JobFacts) -> Alert | None:
    if job.exhausted or job.spent is None or not _is_high(job.spent) or job.status is JobStatus.FAILED:
        return None
    text = f"Job {job.name} has spent {_share(job.spent)} of its privacy budget ({_terms(job.spent)})."
    remedy = "Plan what follows: when the budget is spent the job pauses, and its last version stays available."
    return _of_job(job, "epsilon_high", Severity.WARNING, text, remedy)


def _check_epsilon_exhausted(job: JobFacts) -> Alert | None:
    if not job.exhausted or job.status not in (JobStatus.RUNNING, JobStatus.PAUSED):
        return None
    text = f"Job {job.name} cannot go on: {_short(job.exhausted)}."
    remedy = (
        f"Export the last version (fedplat model export {job.job_id}) and cancel the job (fedplat job cancel "
        f"{job.job_id}); more rounds need a new job with a larger budget."
    )
    return _of_job(job, "epsilon_exhausted", Severity.CRITICAL, text, remedy)


def _check_gave_up(job: JobFacts) -> Alert | None:
    """Raise an alert for a job that was paused by its failures, not by an operator."""
    is_stuck = job.status is JobStatus.PAUSED and job.failures > 0 and job.reason not in ("", _PAUSED_BY_OPERATOR)
    if not is_stuck or job.exhausted or job.problem:
        return None
    text = f"Job {job.name} has paused itself: {_short(job.reason)}."
    remedy = f"Remove the cause and resume the job (fedplat job resume {job.job_id}), or cancel it."
    return _of_job(job, "job_paused", Severity.CRITICAL, text, remedy)


def _check_failed(job: JobFacts) -> Alert | None:
    if job.status is not JobStatus.FAILED or job.failed_s is None or job.failed_s > FAILED_S:
        return None
    text = f"Job {job.name} failed {duration(max(job.failed_s, 0.0))} ago: {_short(job.reason)}."
    remedy = (
        f"Remove the cause and submit the job again; its last version stays available (fedplat job show {job.job_id})."
    )
    return _of_job(job, "job_failed", Severity.WARNING, text, remedy)


def _check_needs_plugins(job: JobFacts) -> Alert | None:
    if not job.problem or job.status is JobStatus.FAILED:
        return None
    text = f"Job {job.name} cannot run on this server: {_short(job.problem)}."
    remedy = (
        "Start the server with the plugins that the job needs (fedplat-server run --plugin KIND.NAME=REF), or update "
        f"it if a newer version made the job; then resume the job (fedplat job resume {job.job_id}). If an older "
        f"version made it, cancel it (fedplat job cancel {job.job_id}) and submit a corrected job file."
    )
    return _of_job(job, "job_needs_plugins", Severity.CRITICAL, text, remedy)


JOB_RULES: Sequence[Callable[[JobFacts], Alert | None]] = (
    _check_stalled,
    _check_too_few_clients,
    _check_many_late,
    _check_attempts_failing,
    _check_gave_up,
    _check_epsilon_high,
    _check_epsilon_exhausted,
    _check_failed,
    _check_needs_plugins,
)


def _check_certificate(server: ServerFacts) -> Alert | None:
    left_s = server.certificate_s
    if left_s is None or left_s >= CERTIFICATE_S:
        return None
    renew = f"Renew it on the server's host: {server.renewal}"
    remedy = f"{renew if server.renewal else _REPLACE}. A restart is not needed."
    if left_s <= 0.0:
        text = f"The server's certificate expired {duration(-left_s)} ago: clients and operators cannot connect."
        return Alert("certificate_expired", Severity.CRITICAL, text, remedy)
    text = f"The server's certificate expires in {duration(left_s)}."
    return Alert("certificate_expiring", Severity.WARNING, text, remedy)


def is_scarce(free_bytes: int, total_bytes: int) -> bool:
    """Return whether a disk is nearly full; of a small disk, only if it is half full."""
    return free_bytes < DISK_RATIO * total_bytes or free_bytes < min(DISK_BYTES, total_bytes / 2)


def _check_disk_low(server: ServerFacts) -> Alert | None:
    free, total = server.disk_free_bytes, server.disk_total_bytes
    if not is_scarce(free, total):
        return None
    text = f"The disk of the data folder has {_size(free)} of {_size(total)} free ({free / total:.0%})."
    return Alert("disk_low", Severity.WARNING, text, _free_space(server))


def _check_storage_full(server: ServerFacts) -> Alert | None:
    if server.full_s is None or server.full_s > FULL_S:
        return None
    number = f"{server.num_full} write{'s' if server.num_full > 1 else ''}"
    text = (
        f"Storage was full {duration(max(server.full_s, 0.0))} ago: {number} failed since the server started, so "
        "rounds could not go on."
    )
    return Alert("storage_full", Severity.CRITICAL, text, _free_space(server))


def _check_object_store(server: ServerFacts) -> Alert | None:
    store = server.store
    if store is None or store.last_s > FULL_S:
        return None
    text = (
        f"The object store of the spool ({store.url}) has failed for {duration(max(store.failing_s, 0.0))}: "
        f"{_short(store.problem)}. No report is accepted until it works."
    )
    remedy = (
        "Repair the store, the network to it, or the key and its permissions (the variables AWS_... of the daemons). "
        "Clients keep their updates and try again until their deadlines."
    )
    return Alert("object_store_failing", Severity.CRITICAL, text, remedy)


def _check_webhooks(server: ServerFacts) -> Alert | None:
    if not server.webhooks:
        return None
    first = max(server.webhooks, key=lambda webhook: webhook.failing_s)
    text = f"Webhook {first.webhook_id} ({first.receiver}) has accepted no event for {duration(first.failing_s)}"
    text += f": {_short(first.result)}" if first.result else ""
    more = len(server.webhooks) - 1
    text += f"; {more} more webhook{'s fail' if more > 1 else ' fails'} too." if more else "."
    remedy = (
        f"Repair the receiver and try it (fedplat webhook test {first.webhook_id}), or remove the webhook (fedplat "
        f"webhook remove {first.webhook_id}): events are sent again for about 32 hours."
    )
    return Alert("webhook_failing", Severity.WARNING, text, remedy)


def _free_space(server: ServerFacts) -> str:
    return (
        "Free space, or enlarge the disk or the quota of the object store. Let running jobs keep fewer versions "
        "(fedplat job set JOB retention.versions=5), and remove old data of ended ones on the server's host"
        f"{', while the server is stopped' if server.is_alone else ''} ({server.prune} --keep-versions 5)."
    )


_REPLACE = "Replace the files of --tls-certificate and --tls-key on the server's host"
SERVER_RULES: Sequence[Callable[[ServerFacts], Alert | None]] = (
    _check_certificate,
    _check_disk_low,
    _check_storage_full,
    _check_object_store,
    _check_webhooks,
)


def _population_epsilon(name: str, spent: Spent) -> Alert:
    text = (
        f"The private jobs of population {name} have released or planned {_share(spent)} of its privacy budget "
        f"({_terms(spent)})."
    )
    remedy = (
        "Cancel jobs that are not needed, or set a larger budget (fedplat privacy budget): a new job that exceeds the "
        "rest is refused."
    )
    return Alert("epsilon_high", Severity.WARNING, text, remedy, population=name)


def _is_high(spent: Spent) -> bool:
    return spent.epsilon > BUDGET_RATIO * spent.budget


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _share(spent: Spent) -> str:
    return f"{spent.epsilon / spent.budget:.0%}"


def _terms(spent: Spent) -> str:
    return f"epsilon {spent.epsilon:.3g} of {spent.budget:.3g}"


def _of_job(job: JobFacts, name: str, severity: Severity, text: str, remedy: str) -> Alert:
    return Alert(name, severity, text, remedy, job.job_id, job.population)


def _no_client(job: JobFacts) -> str:
    return f"no client of population {job.population} is connected"


def _start_clients(job: JobFacts) -> str:
    option = f" with {job.option}" if job.option else ""
    clients = f"clients of population {job.population}{option}"
    return f"Start {clients}, or check their logs and the network between them and here."


def _short(reason: str) -> str:
    return shorten(reason, _MAX_REASON_BYTES).rstrip(". \n") or "no reason is known"


class AlertChanges(NamedTuple):
    """The alerts that were raised, and those that ended."""

    raised: Sequence[Alert]
    ended: Sequence[Alert]


class AlertBook:
    """The alerts of the last evaluation, with the times at which they were first seen."""

    def __init__(self) -> None:
        self._current: dict[tuple[str, str, str], tuple[Alert, float]] = {}

    def load(self, alerts: Iterable[tuple[Alert, float]]) -> None:
        """Replace the alerts by stored ones, each with the time since which it lasts."""
        self._current = {alert.key: (alert, since_unix_s) for alert, since_unix_s in alerts}

    def compare(self, alerts: Iterable[Alert]) -> AlertChanges:
        """Return the changes from the alerts of the last evaluation to these."""
        new = {alert.key: alert for alert in alerts}
        raised = [alert for key, alert in new.items() if key not in self._current]
        ended = [alert for key, (alert, _) in self._current.items() if key not in new]
        return AlertChanges(raised, ended)

    def update(self, alerts: Iterable[Alert], unix_s: float) -> None:
        """Replace the alerts; those that were not there before last since `unix_s`."""
        before = self._current
        self._current = {
            alert.key: (alert, before[alert.key][1] if alert.key in before else unix_s) for alert in alerts
        }

    @property
    def current(self) -> Sequence[tuple[Alert, float]]:
        """The alerts, each with the time since which it lasts (unix seconds)."""
        return list(self._current.values())
