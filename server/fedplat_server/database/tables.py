"""The tables, portable between SQLite and PostgreSQL; `migrations/` creates them.

Public ids are strings; `sequence` columns keep the order in which rows were added, which wall clocks do not. A
client's assignments outlive its enrollment, so they do not reference `clients`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    case,
    cast,
    false,
    func,
    literal_column,
    text,
)
from sqlalchemy.sql.elements import ColumnElement
from typing_extensions import override

from fedplat.texts import MAX_TEXT_BYTES, shorten

MAX_METRICS_BYTES = 64 * 2**10
"""Maximum length of metrics as JSON that a query returns. Those of a report have a sixth of it at most."""


class Metrics(TypeDecorator[Mapping[str, float]]):
    """Named numbers as JSON. NaN and infinities, which JSON does not support, are stored as text.

    Metrics above `MAX_METRICS_BYTES`, which earlier versions accepted from clients, are read as empty.
    """

    impl = JSON
    cache_ok = True

    @override
    def process_bind_param(self, value: Mapping[str, float] | None, dialect: Dialect) -> dict[str, float | str]:
        return {name: x if math.isfinite(x) else str(x) for name, x in (value or {}).items()}

    @override
    def process_result_value(self, value: Mapping[str, float | str] | None, dialect: Dialect) -> dict[str, float]:
        return {name: float(x) for name, x in (value or {}).items()}

    @override
    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression that a query selects, with which the database itself leaves out long values."""
        size = func.length(cast(column, Text))
        return case((size > MAX_METRICS_BYTES, literal_column("'{}'")), else_=column)


class Words(TypeDecorator[str]):
    """Text for people, partly from clients: stored and read with `MAX_TEXT_BYTES` bytes at most.

    Control characters are replaced: they control terminals, and PostgreSQL rejects NUL.
    """

    impl = Text
    cache_ok = True

    @override
    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return shorten(value) if value is not None else None

    @override
    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return shorten(value) if value is not None else None

    @override
    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression that a query selects: the database cuts longer text, which earlier versions stored."""
        return func.substr(column, 1, MAX_TEXT_BYTES + 1, type_=self)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# SQLite only numbers rows in a column of type INTEGER, which has 64 bits there.
_Sequence = BigInteger().with_variant(Integer(), "sqlite")

clients = Table(
    "clients",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("client_id", String, nullable=False, unique=True),
    Column("population", String, nullable=False, index=True),
    Column("labels", JSON, nullable=False),
    Column("software_version", Words, nullable=False),
    Column("idempotency_key", String, nullable=False, unique=True),
    Column("enrolled_unix_s", Float, nullable=False),
    Column("public_key", LargeBinary, nullable=False, unique=True),
    Column("session_number", BigInteger, nullable=False),
    Column("revoked_unix_s", Float),
    # The enrollment token that it used; "" for clients that enrolled before this was stored.
    Column("token_id", String, nullable=False, index=True, server_default=""),
    # The time at which it last opened a session, if that is known.
    Column("seen_unix_s", Float),
)

enrollment_tokens = Table(
    "enrolment_tokens",  # as the first release spelled it
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("token_id", String, nullable=False, unique=True),
    Column("population", String, nullable=False),
    Column("token_hash", LargeBinary, nullable=False, unique=True),
    Column("num_uses", Integer, nullable=False),
    Column("num_left", Integer, nullable=False),
    Column("created_unix_s", Float, nullable=False),
    Column("expires_unix_s", Float, nullable=False),
    Column("revoked_unix_s", Float),
)

jobs = Table(
    "jobs",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False, unique=True),
    Column("population", String, nullable=False),
    Column("job_file", Text, nullable=False),
    Column("idempotency_key", String, nullable=False, unique=True),
    Column("status", String, nullable=False),
    Column("reason", Words, nullable=False),
    Column("round", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("latest_version", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("created_unix_s", Float, nullable=False),
    # The id of the last save of the job, which shows whether a save was committed if its reply was lost.
    Column("save_id", String, nullable=False, server_default=""),
    # The calibrated table [privacy] of a private job, as of its creation.
    Column("privacy", JSON(none_as_null=True)),
    # The versions of the plugins that it runs with (`PluginVersion`); NULL: none.
    Column("plugins", JSON(none_as_null=True)),
    # The ids of the clients that the job's Flower app has drawn for the next round; NULL: none.
    Column("cohort", JSON(none_as_null=True)),
    # What the protocol of its training keeps (`RoundProtocol.write_state`); NULL: nothing.
    Column("protocol", JSON(none_as_null=True)),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", String, ForeignKey("jobs.job_id"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("kind", String, nullable=False),
    Column("phase", String, nullable=False),
    Column("reason", Words, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("goal", Integer, nullable=False),
    Column("minimum", Integer, nullable=False),
    Column("target", Integer, nullable=False),
    Column("opened_unix_s", Float, nullable=False),
    Column("ended_unix_s", Float),
    Column("metrics", Metrics, nullable=False),
    # The time at which its history, and that of its assignments, was removed; NULL: it is kept.
    Column("history_removed_unix_s", Float),
    # The largest numbers of a draw: clients of the population that were waiting, and those that could be drawn.
    Column("num_checked_in", Integer, nullable=False, server_default="0"),
    Column("num_eligible", Integer, nullable=False, server_default="0"),
    # The number of updates in the smallest sum of a secure aggregation that its server has asked to unmask; 0: none.
    # What the attempts of a job with `privacy.trust = "none"` cost depends on it: it is kept as long as the job.
    Column("num_survivors", Integer, nullable=False, server_default="0"),
    PrimaryKeyConstraint("job_id", "round", "number"),
)
ONE_COMMIT = text("kind IN ('TRAIN', 'WARM_START') AND phase = 'COMMITTED'")
"""Condition for attempts that made a version. It must have the same text as that of the index, else it is not used."""
Index(
    "uq_attempts_committed",
    attempts.c.job_id,
    attempts.c.round,
    unique=True,
    sqlite_where=ONE_COMMIT,
    postgresql_where=ONE_COMMIT,
)

assignments = Table(
    "assignments",
    metadata,
    Column("job_id", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("client_id", String, nullable=False),
    Column("token_hash", LargeBinary, nullable=False, unique=True),
    Column("state", String, nullable=False),
    Column("reason", String),
    Column("text", Words, nullable=False),
    Column("digest", String, nullable=False),
    Column("num_examples", Float, nullable=False),
    Column("weight", Float, nullable=False),
    Column("metrics", Metrics, nullable=False),
    Column("took_s", Float),
    # The job's revision at its report, which orders the reports of a job.
    Column("reported_revision", BigInteger),
    Column("assigned_unix_s", Float, nullable=False, server_default="0"),
    Column("deadline_unix_s", Float, nullable=False, server_default="0"),
    Column("report_number", Integer),
    Column("update_bytes", BigInteger, nullable=False, server_default="0"),
    Column("base_version", Integer, nullable=False, server_default="0"),
    # NULL until an attempt has folded the update.
    Column("staleness", Integer),
    # The attempt that has folded the update, if that is a later one than its own.
    Column("into_round", Integer),
    Column("into_number", Integer),
    # L2 norm of the reported update; private jobs do not keep it.
    Column("norm", Float),
    # When the client had the model, began to upload, and ended its work (with a report, or without); NULL: not known.
    # The first is written after the fact, and a crash may lose it (`AssignmentStore.record_downloads`).
    Column("downloaded_unix_s", Float),
    Column("uploading_unix_s", Float),
    Column("ended_unix_s", Float),
    # The client's place on the roster of a secure aggregation, -1 before it has one; NULL: the attempt has none.
    Column("secure_group", Integer),
    Column("secure_position", Integer),
    PrimaryKeyConstraint("job_id", "round", "number", "client_id"),
    ForeignKeyConstraint(["job_id", "round", "number"], ["attempts.job_id", "attempts.round", "attempts.number"]),
    Index(None, "job_id", "reported_revision"),
    Index(None, "job_id", "client_id", "round"),
)

_later = text("into_round IS NOT NULL")
STILL_OPEN = text("state IN ('TRAINING', 'UPLOADING', 'REPORTED')")
"""Condition for open assignments, but not ADVERTISED or SHARED ones: their attempt is the last of its job, and open. It
must have the same text as that of the index, else the index is not used."""
_into = (assignments.c.job_id, assignments.c.into_round, assignments.c.into_number)
Index("ix_assignments_into", *_into, sqlite_where=_later, postgresql_where=_later)
Index("ix_assignments_open", assignments.c.job_id, sqlite_where=STILL_OPEN, postgresql_where=STILL_OPEN)

# What clients sent in the secure aggregations of open attempts: a row for each message, so that none is written twice.
# The transaction that ends an attempt removes its rows.
secure_messages = Table(
    "secure_messages",
    metadata,
    Column("job_id", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("client_id", String, nullable=False),
    # A field of `SecureMessages`.
    Column("kind", String, nullable=False),
    Column("content", LargeBinary, nullable=False),
    PrimaryKeyConstraint("job_id", "round", "number", "client_id", "kind"),
    ForeignKeyConstraint(
        ["job_id", "round", "number", "client_id"],
        ["assignments.job_id", "assignments.round", "assignments.number", "assignments.client_id"],
    ),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("job_id", String, ForeignKey("jobs.job_id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("digest", String, nullable=False, index=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("state_digest", String, nullable=False),
    Column("num_updates", Integer, nullable=False),
    Column("total_weight", Float, nullable=False),
    Column("created_unix_s", Float, nullable=False),
    Column("metrics", Metrics, nullable=False),
    Column("delta_digest", String, nullable=False, index=True, server_default=""),
    Column("delta_size_bytes", BigInteger, nullable=False, server_default="0"),
    Column("delta_base", String, nullable=False, server_default=""),
    # The version that a rollback has restored.
    Column("restored_from", Integer),
    # The times at which the files were removed (those of the model and its delta, that of the state); NULL: kept.
    Column("model_removed_unix_s", Float),
    Column("state_removed_unix_s", Float),
    # The mean of a decentralised job: there is no file.
    Column("is_held_by_clients", Boolean, nullable=False, server_default=false()),
    PrimaryKeyConstraint("job_id", "version"),
)
# Round 0 may have two: the initial model, and that of a warm start.
OF_ROUNDS = text("round > 0")
"""Condition for versions of rounds. It must have the same text as that of the index, else the index is not used."""
Index(
    "uq_model_versions_round",
    model_versions.c.job_id,
    model_versions.c.round,
    unique=True,
    sqlite_where=OF_ROUNDS,
    postgresql_where=OF_ROUNDS,
)

# A row for each version of a private job's round, added in the transaction that commits the version.
ledger = Table(
    "ledger",
    metadata,
    Column("job_id", String, nullable=False),
    Column("version", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    # JSON in a canonical form, so that equal mechanisms can be counted.
    Column("mechanism", Text, nullable=False),
    Column("unix_s", Float, nullable=False),
    PrimaryKeyConstraint("job_id", "version"),
    ForeignKeyConstraint(["job_id", "version"], ["model_versions.job_id", "model_versions.version"]),
)

# The revision grows with each new job and each change of the budget; without a budget epsilon and delta are NULL.
populations = Table(
    "populations",
    metadata,
    Column("population", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("epsilon", Float),
    Column("delta", Float),
)

# A row for each population and hour: different clients that checked in, and the most that waited or worked at a time.
availability = Table(
    "availability",
    metadata,
    Column("population", String, nullable=False),
    Column("hour_unix_s", Float, nullable=False),
    Column("num_seen", Integer, nullable=False),
    Column("max_available", Integer, nullable=False),
    PrimaryKeyConstraint("population", "hour_unix_s"),
)

history = Table(
    "history",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("unix_s", Float, nullable=False),
    Column("job_id", String, ForeignKey("jobs.job_id"), nullable=False),
    Column("entity", String, nullable=False),
    Column("from_state", String, nullable=False),
    Column("to_state", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("client_id", String, nullable=False),
    Column("reason", Words, nullable=False),
    Column("metrics", Metrics, nullable=False),
    Column("kind", String, nullable=False),
    Column("update_bytes", BigInteger, nullable=False, server_default="0"),
    Column("norm", Float),
    Index(None, "job_id", "sequence"),
)

operators = Table(
    "operators",
    metadata,
    Column("name", String, primary_key=True),
    Column("role", String, nullable=False),
    Column("token_hash", LargeBinary, nullable=False, unique=True),
    Column("created_unix_s", Float, nullable=False),
    Column("expires_unix_s", Float),
)

# The chain numbers the rows, not the database: without gaps.
audit_log = Table(
    "audit_log",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("unix_s", Float, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("details", Text, nullable=False),
    Column("previous_hash", String, nullable=False),
    Column("hash", String, nullable=False),
    Index("ix_audit_log_actor", "actor", "sequence"),
    Index("ix_audit_log_action", "action", "sequence"),
)

# One row: the head of the audit log.
audit_head = Table(
    "audit_head", metadata, Column("num_rows", BigInteger, nullable=False), Column("hash", String, nullable=False)
)

# The transaction of a change numbers its events, not the database: without gaps, in the order of the commits.
events = Table(
    "events",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("unix_s", Float, nullable=False),
    Column("type", String, nullable=False),
    Column("job_id", String, nullable=False),
    Column("job_name", String, nullable=False),
    Column("population", String, nullable=False),
    Column("client_id", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("subject", String, nullable=False),
    Column("text", Words, nullable=False),
    Index(None, "job_id", "sequence"),
)

# One row: the oldest revision whose code may use the database. See `schema.is_usable`.
schema_compatibility = Table("schema_compatibility", metadata, Column("compatible_from", String, nullable=False))

# One row: the id with which the database owns its models and updates outside it. A copy of the database has it too.
database_identity = Table("database_identity", metadata, Column("database_id", String, nullable=False))

# One row: the number of the last event.
event_head = Table("event_head", metadata, Column("last_sequence", BigInteger, nullable=False))

webhooks = Table(
    "webhooks",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("webhook_id", String, nullable=False, unique=True),
    Column("url", Text, nullable=False),
    # The types of the events that it receives; an empty list means all.
    Column("types", JSON, nullable=False),
    # The key of the signatures. It must be readable, unlike the tokens of operators.
    Column("secret", Text, nullable=False),
    Column("created_unix_s", Float, nullable=False),
    # The number of the last event whose delivery was scheduled.
    Column("cursor", BigInteger, nullable=False),
    Column("last_result", Words, nullable=False),
    Column("last_unix_s", Float),
    Column("failing_since_unix_s", Float),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("event_sequence", BigInteger, nullable=False),
    Column("webhook_id", String, ForeignKey("webhooks.webhook_id"), nullable=False),
    Column("state", String, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("result", Words, nullable=False),
    Column("last_unix_s", Float),
    # The time of the next attempt; NULL after the last one.
    Column("next_unix_s", Float),
    PrimaryKeyConstraint("event_sequence", "webhook_id"),
)
STILL_PENDING = text("state = 'pending'")
"""Condition for pending deliveries. It must have the same text as that of the index, else the index is not used."""
_due = (deliveries.c.webhook_id, deliveries.c.next_unix_s, deliveries.c.event_sequence)
Index("ix_deliveries_pending", *_due, sqlite_where=STILL_PENDING, postgresql_where=STILL_PENDING)

# The leader. Times are on the database's clock; an empty holder means that the lease was released.
leases = Table(
    "leases",
    metadata,
    Column("name", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("address", String, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("secret", String, nullable=False),
    Column("renewed_unix_s", Float, nullable=False),
    Column("expires_unix_s", Float, nullable=False),
)
