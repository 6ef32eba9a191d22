"""Stored records: tokens and clients, jobs with their files, attempts and versions, releases and budgets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import sqlalchemy
from msgspec import structs

from fedplat.config import decoding, loaded_plugins, toml
from fedplat.config.decoding import prepare_type
from fedplat.config.plugins import BUILTIN, Plugins
from fedplat.errors import FedplatError, JobFileError, PluginError, UserCodeError
from fedplat.job import JobSpec, parse_job, read_newer
from fedplat.privacy import Charge, Mechanism, Privacy
from fedplat.rounds import Attempt, AttemptKey, HistoryRow, JobState, ModelVersion
from fedplat.rounds.invariants.records import JobRow
from fedplat.rounds.states import ENDED_JOBS, AssignmentState, JobStatus
from fedplat_server.errors import StoreError, TokenRefusedError
from fedplat_server.records.audit import AuditEntry


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRecord:
    """An enrolled client.

    `session_number` is the number of sessions that it has opened; only the last one is valid. `token_id` is the
    enrollment token that it used; empty if it enrolled with a version of fedplat that did not store it.
    """

    client_id: str
    population: str
    labels: Mapping[str, str]
    software_version: str
    enrolled_unix_s: float
    public_key: bytes
    session_number: int = 0
    revoked_unix_s: float | None = None
    token_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientFilter:
    """The clients of a list: those that satisfy all conditions; the default is all clients.

    `labels` are labels that a client must have, `search` is a part of its id. `only` are the ids of the clients to
    choose from (None: all), and `without` those to leave out: both may have as many ids as there are clients.
    """

    population: str | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    search: str = ""
    is_revoked: bool | None = None
    only: Collection[str] | None = None
    without: Collection[str] = ()


ALL_CLIENTS = ClientFilter()
"""The filter that every client satisfies."""

NewEntries: TypeAlias = Callable[[ClientRecord], Sequence[AuditEntry]]
"""A function that returns the audit entries for a changed client, which is only known within the transaction."""


def no_entries(client: ClientRecord) -> Sequence[AuditEntry]:
    """Return no entries."""
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class EnrollmentToken:
    """A token with which clients enroll. The database stores its hash with this record, never the token."""

    token_id: str
    population: str
    num_uses: int
    num_left: int
    created_unix_s: float
    expires_unix_s: float
    revoked_unix_s: float | None = None

    def describe_problem(self, unix_s: float) -> str:
        """Return why the token is unusable at `unix_s` ("revoked", "used up" or "expired"), or ""."""
        if self.revoked_unix_s is not None:
            return "revoked"
        if self.num_left <= 0:
            return "used up"
        return "expired" if unix_s >= self.expires_unix_s else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Enrollment:
    """A request to enroll. `client_id` is the id of the new client, if the idempotency key is new."""

    client_id: str
    population: str
    labels: Mapping[str, str]
    software_version: str
    public_key: bytes
    token_hash: bytes
    idempotency_key: str


def make_token_error(token: EnrollmentToken | None, population: str, unix_s: float) -> TokenRefusedError:
    """Return the error for an enrollment with this unusable token; None: the token is unknown."""
    if token is None:
        return TokenRefusedError("", is_known=False)
    if token.population != population:
        return TokenRefusedError("it is for another population")
    return TokenRefusedError(f"it is {token.describe_problem(unix_s)}")


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: its state in the coordinator, its job file and the time of its creation.

    `problem` is the first mistake in the job file with the plugins that the process has; then the options of plugins in
    the state are `AbsentPlugin`.
    """

    state: JobState
    job_file: str
    created_unix_s: float
    problem: str = ""

    def with_digest(self, digest: str) -> JobRecord:
        """Return the record with the digest of the job, which is not stored."""
        return dataclasses.replace(self, state=structs.replace(self.state, digest=digest))


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptFilter:
    """The attempts of a list: those of a job, only those at one round if it is not 0, and in which order.

    Abandoned attempts are included only with `all_attempts`.
    """

    job_id: str
    all_attempts: bool = False
    round: int = 0
    newest_first: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Staleness:
    """The staleness of an attempt's updates in versions: mean and maximum."""

    mean: float = 0.0
    most: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """The numbers of the assignments that count for an attempt.

    An assignment counts for the attempt that its update was folded into; until then, for the attempt that created it.
    `update_bytes` is the total size of the reported updates, `largest_norm` the largest of their norms. Of the assigned
    clients `num_downloaded` received the model, and `num_trained` completed the training.
    """

    counts: Mapping[AssignmentState, int]
    update_bytes: int = 0
    staleness: Staleness = Staleness()
    largest_norm: float | None = None
    num_downloaded: int = 0
    num_trained: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt, without its assignments, and what they add up to; `ended_unix_s` is None while it is open."""

    attempt: Attempt
    opened_unix_s: float
    ended_unix_s: float | None
    tally: Tally

    @property
    def key(self) -> AttemptKey:
        """The identity of the attempt."""
        return self.attempt.key


@dataclasses.dataclass(frozen=True, slots=True)
class VersionRecord:
    """A model version with its metrics by the server's evaluator.

    `model_removed_unix_s` is the time at which the files of the model and its delta were removed,
    `state_removed_unix_s` that at which the file of the rule's state was removed. None: the files are kept, if any.
    """

    version: ModelVersion
    created_unix_s: float
    metrics: Mapping[str, float]
    model_removed_unix_s: float | None = None
    state_removed_unix_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A row of the append-only history. Sequence numbers grow over all jobs, with gaps."""

    sequence: int
    unix_s: float
    row: HistoryRow


@dataclasses.dataclass(frozen=True, slots=True)
class RetainedVersions:
    """The versions of a job that keep their files.

    Models are kept from version `models_from` on, and of each version that is a multiple of `every` (0: of none);
    states are kept from version `states_from` on. The models of version 0, of the latest version, and of versions that
    open attempts and assignments are based on are always kept.
    """

    models_from: int = 0
    every: int = 0
    states_from: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Removable:
    """A version with removable files: those of its model and delta (`model`), that of the rule's state (`state`)."""

    version: ModelVersion
    model: bool
    state: bool


def spaced_positions(total: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers from 1 to `total`, with both ends.

    >>> spaced_positions(10, 4)
    [1, 4, 7, 10]
    """
    if total <= most:
        return list(range(1, total + 1))
    last = max(most, 2) - 1
    return [1 + (index * (total - 1) + last // 2) // last for index in range(last + 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The maximum privacy loss of all private jobs of a population together."""

    epsilon: float
    delta: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """The releases of a job so far, and all releases that it may make (`planned`; None: the job is not private)."""

    job_id: str
    status: JobStatus
    planned: Charge | None
    released: tuple[Charge, ...] = ()

    @property
    def is_private(self) -> bool:
        """True if the job publishes private releases."""
        return self.planned is not None

    @property
    def has_ended(self) -> bool:
        """True if the job has ended and will make no more releases."""
        return self.status in ENDED_JOBS

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges to a budget: all planned releases, or those of the past if the job has ended."""
        return self.released if self.planned is None or self.has_ended else (self.planned,)


@dataclasses.dataclass(frozen=True, slots=True)
class Population:
    """A population's budget, if it has one, and the accounts of its jobs in the order of their creation.

    `revision` grows with each new job and each change of the budget; it begins at 0.
    """

    name: str
    revision: int
    budget: Budget | None
    accounts: tuple[Account, ...]

    @property
    def charges(self) -> tuple[Charge, ...]:
        """The charges of its jobs to the budget."""
        return tuple(charge for account in self.accounts for charge in account.charges)


def encode_mechanism(mechanism: Mechanism) -> str:
    """Return a mechanism as JSON for the ledger; equal mechanisms have equal texts.

    It is the text of earlier releases, except for the noise of clients, which they do not know.
    """
    fields = msgspec.structs.asdict(mechanism)
    if mechanism.kind != "skellam":
        del fields["steps"]
    return msgspec.json.encode(fields).decode()


def decode_mechanism(text: str) -> Mechanism:
    """Return a mechanism of the ledger. Raises `msgspec.ValidationError` if the text is not one."""
    return msgspec.json.decode(text, type=prepare_type(Mechanism))


Row = sqlalchemy.Row[Any]


class JobFileReader:
    """Reads stored job files with the plugins of this process; each is parsed once."""

    def __init__(self, plugins: Plugins = BUILTIN) -> None:
        self._plugins = plugins
        self._parse = functools.lru_cache(maxsize=1024)(self._parse_file)

    def read(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        """Return the job of a row of `jobs`, with its calibrated `[privacy]`, and the first mistake in its file.

        If there is a mistake, or this process lacks a plugin of the job, the options of its plugins are `AbsentPlugin`.
        A job file of a newer release is read by `read_newer`. Raises `StoreError` for what is not a job file.
        """
        try:
            return self._read_known(row)
        except (JobFileError, msgspec.ValidationError) as exc:
            problem = str(exc).partition("\n")[0]
        try:
            return read_newer(row.job_file, row.privacy), problem
        except JobFileError as exc:
            raise StoreError(
                f"the stored job file of {row.job_id} cannot be read by this version of fedplat: {exc}"
            ) from exc

    def _read_known(self, row: Row | JobRow) -> tuple[JobSpec, str]:
        plugins = read_plugins(row.plugins)
        spec, problem = self._parse(row.job_file, plugins)
        try:
            return with_calibrated(spec, row.privacy), problem
        except (PluginError, UserCodeError) as exc:  # it builds the job's rule again
            return with_calibrated(_without_plugins(row.job_file, plugins), row.privacy), str(exc)

    def _parse_file(self, job_file: str, plugins: tuple[loaded_plugins.PluginVersion, ...]) -> tuple[JobSpec, str]:
        try:
            return parse_job(job_file, self._plugins), ""
        except FedplatError as exc:  # the code of a plugin may raise any of them
            if not plugins:
                raise
            return _without_plugins(job_file, plugins), str(exc).partition("\n")[0]


def _without_plugins(job_file: str, plugins: Iterable[loaded_plugins.PluginVersion]) -> JobSpec:
    """Parse a stored job file; the options of its plugins are `AbsentPlugin`. Raises `JobFileError`."""
    absent = frozenset((version.kind, version.name) for version in plugins)
    return toml.read_record(toml.read_toml(job_file), JobSpec, plugins=Plugins(absent=absent))


def read_plugins(stored: object) -> tuple[loaded_plugins.PluginVersion, ...]:
    """Return the versions of a job's plugins from their stored form. Raises `msgspec.ValidationError`."""
    return msgspec.convert(stored or (), decoding.prepare_type(tuple[loaded_plugins.PluginVersion, ...]))


def with_calibrated(spec: JobSpec, privacy: object) -> JobSpec:
    """Return a job with its calibrated `[privacy]`, a value of the column `privacy`.

    Raises `JobFileError` or `msgspec.ValidationError` if they do not belong together.
    """
    if (spec.privacy is None) != (privacy is None):
        raise JobFileError("privacy: the job file and the stored [privacy] do not agree")
    if privacy is None:
        return spec
    return msgspec.structs.replace(spec, privacy=msgspec.convert(privacy, decoding.prepare_type(Privacy)))
