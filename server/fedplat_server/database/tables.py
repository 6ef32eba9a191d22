"""The tables, portable between SQLite and PostgreSQL; `migrations/` creates them.

Public ids are strings; `sequence` columns keep the order in which rows were added, which wall clocks do not. A
client's assignments outlive its enrollment, so they do not reference `clients`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement
from typing_extensions import override

from fedplat.texts import MAX_TEXT_BYTES, shorten

MAX_METRICS_BYTES = 64 * 2**10
"""Maximum length of metrics as JSON that a query returns. Those of a report have a sixth of it at most."""


class Metrics(sa.TypeDecorator[Mapping[str, float]]):
    """Named numbers as JSON. NaN and infinities, which JSON does not support, are stored as text.

    Metrics above `MAX_METRICS_BYTES`, which earlier versions accepted from clients, are read as empty.
    """

    impl = sa.JSON
    cache_ok = True

    @override
    def process_bind_param(self, value: Mapping[str, float] | None, dialect: sa.Dialect) -> dict[str, float | str]:
        return {name: x if math.isfinite(x) else str(x) for name, x in (value or {}).items()}

    @override
    def process_result_value(self, value: Mapping[str, float | str] | None, dialect: sa.Dialect) -> dict[str, float]:
        return {name: float(x) for name, x in (value or {}).items()}

    @override
    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression that a query selects, with which the database itself leaves out long values."""
        size = sa.func.length(sa.cast(column, sa.Text))
        return sa.case((size > MAX_METRICS_BYTES, sa.literal_column("'{}'")), else_=column)


class Words(sa.TypeDecorator[str]):
    """Text for people, partly from clients: stored and read with `MAX_TEXT_BYTES` bytes at most.

    Control characters are replaced: they control terminals, and PostgreSQL rejects NUL.
    """

    impl = sa.Text
    cache_ok = True

    @override
    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return shorten(value) if value is not None else None

    @override
    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return shorten(value) if value is not None else None

    @override
    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression that a query selects: the database cuts longer text, which earlier versions stored."""
        return sa.func.substr(column, 1, MAX_TEXT_BYTES + 1, type_=self)


metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

# SQLite only numbers rows in a column of type INTEGER, which has 64 bits there.
_Sequence = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

clients = sa.Table(
    "clients",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    sa.Column("client_id", sa.String, nullable=False, unique=True),
    sa.Column("population", sa.String, nullable=False, index=True),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("software_version", Words, nullable=False),
    sa.Column("idempotency_key", sa.String, nullable=False, unique=True),
    sa.Column("enrolled_unix_s", sa.Float, nullable=False),
    sa.Column("public_key", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("session_number", sa.BigInteger, nullable=False),
    sa.Column("revoked_unix_s", sa.Float),
    # The enrollment token that it used; "" for clients that enrolled before this was stored.
    sa.Column("token_id", sa.String, nullable=False, index=True, server_default=""),
    # The time at which it last opened a session, if that is known.
    sa.Column("seen_unix_s", sa.Float),
)

enrollment_tokens = sa.Table(
    "enrolment_tokens",  # as the first release spelled it
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    sa.Column("token_id", sa.String, nullable=False, unique=True),
    sa.Column("population", sa.String, nullable=False),
    sa.Column("token_hash", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("num_uses", sa.Integer, nullable=False),
    sa.Column("num_left", sa.Integer, nullable=False),
    sa.Column("created_unix_s", sa.Float, nullable=False),
    sa.Column("expires_unix_s", sa.Float, nullable=False),
    sa.Column("revoked_unix_s", sa.Float),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    sa.Column("job_id", sa.String, nullable=False, unique=True),
    sa.Column("population", sa.String, nullable=False),
    sa.Column("job_file", sa.Text, nullable=False),
    sa.Column("idempotency_key", sa.String, nullable=False, unique=True),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("reason", Words, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("latest_version", sa.Integer, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("created_unix_s", sa.Float, nullable=False),
    # The id of the last save of the job, which shows whether a save was committed if its reply was lost.
    sa.Column("save_id", sa.String, nullable=False, server_default=""),
    # The calibrated table [privacy] of a private job, as of its creation.
    sa.Column("privacy", sa.JSON(none_as_null=True)),
    # The versions of the plugins that it runs with (`PluginVersion`); NULL: none.
    sa.Column("plugins", sa.JSON(none_as_null=True)),
    # The ids of the clients that the job's Flower app has drawn for the next round; NULL: none.
    sa.Column("cohort", sa.JSON(none_as_null=True)),
    # What the protocol of its training keeps (`RoundProtocol.write_state`); NULL: nothing.
    sa.Column("protocol", sa.JSON(none_as_null=True)),
    # The time at which an operator has deleted it: only the ledger needs its rows. NULL: it is not deleted.
    sa.Column("deleted_unix_s", sa.Float),
)
NOT_DELETED = jobs.c.deleted_unix_s.is_(None)
"""Condition for jobs that are shown and run."""


attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.String, sa.ForeignKey("jobs.job_id"), nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("phase", sa.String, nullable=False),
    sa.Column("reason", Words, nullable=False),
    sa.Column("base_version", sa.Integer, nullable=False),
    sa.Column("goal", sa.Integer, nullable=False),
    sa.Column("minimum", sa.Integer, nullable=False),
    sa.Column("target", sa.Integer, nullable=False),
    sa.Column("opened_unix_s", sa.Float, nullable=False),
    sa.Column("ended_unix_s", sa.Float),
    sa.Column("metrics", Metrics, nullable=False),
    # The time at which its history, and that of its assignments, was removed; NULL: it is kept.
    sa.Column("history_removed_unix_s", sa.Float),
    # The largest numbers of a draw: clients of the population that were waiting, and those that could be drawn.
    sa.Column("num_checked_in", sa.Integer, nullable=False, server_default="0"),
    sa.Column("num_eligible", sa.Integer, nullable=False, server_default="0"),
    # The number of updates in the smallest sum of a secure aggregation that its server has asked to unmask; 0: none.
    # What the attempts of a job with `privacy.trust = "none"` cost depends on it: it is kept as long as the job.
    sa.Column("num_survivors", sa.Integer, nullable=False, server_default="0"),
    sa.PrimaryKeyConstraint("job_id", "round", "number"),
)
ONE_COMMIT = sa.text("kind IN ('TRAIN', 'WARM_START') AND phase = 'COMMITTED'")
"""Condition for attempts that made a version. It must have the same text as that of the index, else it is not used."""
sa.Index(
    "uq_attempts_committed",
    attempts.c.job_id,
    attempts.c.round,
    unique=True,
    sqlite_where=ONE_COMMIT,
    postgresql_where=ONE_COMMIT,
)

assignments = sa.Table(
    "assignments",
    metadata,
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("client_id", sa.String, nullable=False),
    sa.Column("token_hash", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("reason", sa.String),
    sa.Column("text", Words, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("num_examples", sa.Float, nullable=False),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("metrics", Metrics, nullable=False),
    sa.Column("took_s", sa.Float),
    # The job's revision at its report, which orders the reports of a job.
    sa.Column("reported_revision", sa.BigInteger),
    sa.Column("assigned_unix_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("deadline_unix_s", sa.Float, nullable=False, server_default="0"),
    sa.Column("report_number", sa.Integer),
    sa.Column("update_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("base_version", sa.Integer, nullable=False, server_default="0"),
    # NULL until an attempt has folded the update.
    sa.Column("staleness", sa.Integer),
    # The attempt that has folded the update, if that is a later one than its own.
    sa.Column("into_round", sa.Integer),
    sa.Column("into_number", sa.Integer),
    # L2 norm of the reported update; private jobs do not keep it.
    sa.Column("norm", sa.Float),
    # When the client had the model, began to upload, and ended its work (with a report, or without); NULL: not known.
    # The first is written after the fact, and a crash may lose it (`AssignmentStore.record_downloads`).
    sa.Column("downloaded_unix_s", sa.Float),
    sa.Column("uploading_unix_s", sa.Float),
    sa.Column("ended_unix_s", sa.Float),
    # The client's place on the roster of a secure aggregation, -1 before it has one; NULL: the attempt has none.
    sa.Column("secure_group", sa.Integer),
    sa.Column("secure_position", sa.Integer),
    sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id"),
    sa.ForeignKeyConstraint(["job_id", "round", "number"], ["attempts.job_id", "attempts.round", "attempts.number"]),
    sa.Index(None, "job_id", "reported_revision"),
    sa.Index(None, "job_id", "client_id", "round"),
)
SAME_ATTEMPT = sa.and_(*(assignments.c[name] == attempts.c[name] for name in ("job_id", "round", "number")))
"""Condition that joins assignments to the attempts that created them."""

_later = sa.text("into_round IS NOT NULL")
STILL_OPEN = sa.text("state IN ('TRAINING', 'UPLOADING', 'REPORTED')")
"""Condition for open assignments, but not ADVERTISED or SHARED ones: their attempt is the last of its job, and open. It
must have the same text as that of the index, else the index is not used."""
_into = (assignments.c.job_id, assignments.c.into_round, assignments.c.into_number)
sa.Index("ix_assignments_into", *_into, sqlite_where=_later, postgresql_where=_later)
sa.Index("ix_assignments_open", assignments.c.job_id, sqlite_where=STILL_OPEN, postgresql_where=STILL_OPEN)

# What clients sent in the secure aggregations of open attempts: a row for each message, so that none is written twice.
# The transaction that ends an attempt removes its rows.
secure_messages = sa.Table(
    "secure_messages",
    metadata,
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("client_id", sa.String, nullable=False),
    # A field of `SecureMessages`.
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id", "kind"),
    sa.ForeignKeyConstraint(
        ["job_id", "round", "number", "client_id"],
        ["assignments.job_id", "assignments.round", "assignments.number", "assignments.client_id"],
    ),
)

# The bytes of small updates that were accepted, each added in the transaction that accepts its report. The transaction
# after which an update is not needed removes its row.
update_contents = sa.Table(
    "update_contents",
    metadata,
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("client_id", sa.String, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id"),
    sa.ForeignKeyConstraint(
        ["job_id", "round", "number", "client_id"],
        ["assignments.job_id", "assignments.round", "assignments.number", "assignments.client_id"],
    ),
)

# The bytes of small blobs, each added in the transaction that adds its version. Their files are copies, not synced.
# The transaction that gives up the last reference to a blob removes its row.
blob_contents = sa.Table(
    "blob_contents",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

model_versions = sa.Table(
    "model_versions",
    metadata,
    sa.Column("job_id", sa.String, sa.ForeignKey("jobs.job_id"), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("digest", sa.String, nullable=False, index=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("state_digest", sa.String, nullable=False),
    sa.Column("num_updates", sa.Integer, nullable=False),
    sa.Column("total_weight", sa.Float, nullable=False),
    sa.Column("created_unix_s", sa.Float, nullable=False),
    sa.Column("metrics", Metrics, nullable=False),
    sa.Column("delta_digest", sa.String, nullable=False, index=True, server_default=""),
    sa.Column("delta_size_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("delta_base", sa.String, nullable=False, server_default=""),
    # The version that a rollback has restored.
    sa.Column("restored_from", sa.Integer),
    # The times at which the files were removed (those of the model and its delta, that of the state); NULL: kept.
    sa.Column("model_removed_unix_s", sa.Float),
    sa.Column("state_removed_unix_s", sa.Float),
    # The mean of a decentralised job: there is no file.
    sa.Column("is_held_by_clients", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.PrimaryKeyConstraint("job_id", "version"),
)
# Round 0 may have two: the initial model, and that of a warm start.
OF_ROUNDS = sa.text("round > 0")
"""Condition for versions of rounds. It must have the same text as that of the index, else the index is not used."""
sa.Index(
    "uq_model_versions_round",
    model_versions.c.job_id,
    model_versions.c.round,
    unique=True,
    sqlite_where=OF_ROUNDS,
    postgresql_where=OF_ROUNDS,
)

# A row for each version of a private job's round, added in the transaction that commits the version.
# With `privacy.trust = "none"` abandoned attempts are releases, too: `attempts.num_survivors` counts them.
ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    # JSON in a canonical form, so that equal mechanisms can be counted.
    sa.Column("mechanism", sa.Text, nullable=False),
    sa.Column("unix_s", sa.Float, nullable=False),
    sa.PrimaryKeyConstraint("job_id", "version"),
    sa.ForeignKeyConstraint(["job_id", "version"], ["model_versions.job_id", "model_versions.version"]),
)

# The revision grows with each new job and each change of the budget; without a budget epsilon and delta are NULL.
populations = sa.Table(
    "populations",
    metadata,
    sa.Column("population", sa.String, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("epsilon", sa.Float),
    sa.Column("delta", sa.Float),
)

# A row for each population and hour: different clients that checked in, and the most that waited or worked at a time.
availability = sa.Table(
    "availability",
    metadata,
    sa.Column("population", sa.String, nullable=False),
    sa.Column("hour_unix_s", sa.Float, nullable=False),
    sa.Column("num_seen", sa.Integer, nullable=False),
    sa.Column("max_available", sa.Integer, nullable=False),
    sa.PrimaryKeyConstraint("population", "hour_unix_s"),
)

history = sa.Table(
    "history",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    sa.Column("unix_s", sa.Float, nullable=False),
    sa.Column("job_id", sa.String, sa.ForeignKey("jobs.job_id"), nullable=False),
    sa.Column("entity", sa.String, nullable=False),
    sa.Column("from_state", sa.String, nullable=False),
    sa.Column("to_state", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("client_id", sa.String, nullable=False),
    sa.Column("reason", Words, nullable=False),
    sa.Column("metrics", Metrics, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("update_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("norm", sa.Float),
    sa.Index(None, "job_id", "sequence"),
)

operators = sa.Table(
    "operators",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("token_hash", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("created_unix_s", sa.Float, nullable=False),
    sa.Column("expires_unix_s", sa.Float),
)

# The chain numbers the rows, not the database: without gaps.
audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("unix_s", sa.Float, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("details", sa.Text, nullable=False),
    sa.Column("previous_hash", sa.String, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
    sa.Index("ix_audit_log_actor", "actor", "sequence"),
    sa.Index("ix_audit_log_action", "action", "sequence"),
)

# One row: the head of the audit log.
audit_head = sa.Table(
    "audit_head",
    metadata,
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
)

# The transaction of a change numbers its events, not the database: without gaps, in the order of the commits.
events = sa.Table(
    "events",
    metadata,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("unix_s", sa.Float, nullable=False),
    sa.Column("type", sa.String, nullable=False),
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("job_name", sa.String, nullable=False),
    sa.Column("population", sa.String, nullable=False),
    sa.Column("client_id", sa.String, nullable=False),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("subject", sa.String, nullable=False),
    sa.Column("text", Words, nullable=False),
    sa.Index(None, "job_id", "sequence"),
)

# One row: the oldest revision whose code may use the database. See `schema.is_usable`.
schema_compatibility = sa.Table(
    "schema_compatibility", metadata, sa.Column("compatible_from", sa.String, nullable=False)
)

# One row: the id with which the database owns its models and updates outside it. A copy of the database has it too.
database_identity = sa.Table("database_identity", metadata, sa.Column("database_id", sa.String, nullable=False))

# One row: the number of the last event.
event_head = sa.Table("event_head", metadata, sa.Column("last_sequence", sa.BigInteger, nullable=False))

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    sa.Column("webhook_id", sa.String, nullable=False, unique=True),
    sa.Column("url", sa.Text, nullable=False),
    # The types of the events that it receives; an empty list means all.
    sa.Column("types", sa.JSON, nullable=False),
    # The key of the signatures. It must be readable, unlike the tokens of operators.
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("created_unix_s", sa.Float, nullable=False),
    # The number of the last event whose delivery was scheduled.
    sa.Column("cursor", sa.BigInteger, nullable=False),
    sa.Column("last_result", Words, nullable=False),
    sa.Column("last_unix_s", sa.Float),
    sa.Column("failing_since_unix_s", sa.Float),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("event_sequence", sa.BigInteger, nullable=False),
    sa.Column("webhook_id", sa.String, sa.ForeignKey("webhooks.webhook_id"), nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("num_attempts", sa.Integer, nullable=False),
    sa.Column("result", Words, nullable=False),
    sa.Column("last_unix_s", sa.Float),
    # The time of the next attempt; NULL after the last one.
    sa.Column("next_unix_s", sa.Float),
    sa.PrimaryKeyConstraint("event_sequence", "webhook_id"),
)
STILL_PENDING = sa.text("state = 'pending'")
"""Condition for pending deliveries. It must have the same text as that of the index, else the index is not used."""
_due = (deliveries.c.webhook_id, deliveries.c.next_unix_s, deliveries.c.event_sequence)
sa.Index("ix_deliveries_pending", *_due, sqlite_where=STILL_PENDING, postgresql_where=STILL_PENDING)

# The leader. Times are on the database's clock; an empty holder means that the lease was released.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("holder", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("secret", sa.String, nullable=False),
    sa.Column("renewed_unix_s", sa.Float, nullable=False),
    sa.Column("expires_unix_s", sa.Float, nullable=False),
)
