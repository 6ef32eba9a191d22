"""The schema of release 0.1.0.

Revision: 0019.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = None
compatible_from = "0019"

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_clients()
    _create_jobs()
    _create_attempts()
    _create_assignments()
    _create_versions()
    _create_history()
    _create_ledger()
    _create_operators()
    _create_events()
    _create_webhooks()
    _create_leases()
    op.create_table("schema_compatibility", sa.Column("compatible_from", sa.String(), nullable=False))


def _where(condition: str) -> dict[str, Any]:
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def _required(type_: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    """Return columns of a type that are not null."""
    return [sa.Column(name, type_, nullable=False) for name in names]


def _create_clients() -> None:
    op.create_table(
        "clients",
        sa.Column("sequence", _SEQUENCE, primary_key=True),
        sa.Column("client_id", sa.String(), nullable=False, unique=True),
        sa.Column("population", sa.String(), nullable=False, index=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("software_version", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False, unique=True),
        sa.Column("enrolled_unix_s", sa.Float(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False, unique=True),
        sa.Column("session_number", sa.BigInteger(), nullable=False),
        sa.Column("revoked_unix_s", sa.Float()),
        sa.Column("token_id", sa.String(), nullable=False, index=True, server_default=""),
        sa.Column("seen_unix_s", sa.Float()),
    )
    op.create_table(
        "enrolment_tokens",
        sa.Column("sequence", _SEQUENCE, primary_key=True),
        sa.Column("token_id", sa.String(), nullable=False, unique=True),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False, unique=True),
        *_required(sa.Integer(), "num_uses", "num_left"),
        *_required(sa.Float(), "created_unix_s", "expires_unix_s"),
        sa.Column("revoked_unix_s", sa.Float()),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("sequence", _SEQUENCE, primary_key=True),
        sa.Column("job_id", sa.String(), nullable=False, unique=True),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("job_file", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False, unique=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        *_required(sa.Integer(), "round", "failures", "latest_version"),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("save_id", sa.String(), nullable=False, server_default=""),
        sa.Column("privacy", sa.JSON(none_as_null=True)),
        sa.Column("plugins", sa.JSON(none_as_null=True)),
        sa.Column("cohort", sa.JSON(none_as_null=True)),
    )


def _create_attempts() -> None:
    one_commit = "kind IN ('TRAIN', 'WARM_START') AND phase = 'COMMITTED'"
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(), sa.ForeignKey("jobs.job_id"), nullable=False),
        *_required(sa.Integer(), "round", "number"),
        *_required(sa.String(), "kind", "phase"),
        sa.Column("reason", sa.Text(), nullable=False),
        *_required(sa.Integer(), "base_version", "goal", "minimum", "target"),
        sa.Column("opened_unix_s", sa.Float(), nullable=False),
        sa.Column("ended_unix_s", sa.Float()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("history_removed_unix_s", sa.Float()),
        sa.Column("num_checked_in", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("num_eligible", sa.Integer(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("job_id", "round", "number"),
        sa.Index("uq_attempts_committed", "job_id", "round", unique=True, **_where(one_commit)),
    )


def _create_assignments() -> None:
    op.create_table(
        "assignments",
        sa.Column("job_id", sa.String(), nullable=False),
        *_required(sa.Integer(), "round", "number"),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False, unique=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String()),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        *_required(sa.Float(), "num_examples", "weight"),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("took_s", sa.Float()),
        sa.Column("reported_revision", sa.BigInteger()),
        sa.Column("assigned_unix_s", sa.Float(), nullable=False, server_default="0"),
        sa.Column("deadline_unix_s", sa.Float(), nullable=False, server_default="0"),
        sa.Column("report_number", sa.Integer()),
        sa.Column("update_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("base_version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("staleness", sa.Integer()),
        sa.Column("into_round", sa.Integer()),
        sa.Column("into_number", sa.Integer()),
        sa.Column("norm", sa.Float()),
        sa.Column("downloaded_unix_s", sa.Float()),
        sa.Column("uploading_unix_s", sa.Float()),
        sa.Column("ended_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id"),
        sa.ForeignKeyConstraint(
            ["job_id", "round", "number"], ["attempts.job_id", "attempts.round", "attempts.number"]
        ),
        sa.Index("ix_assignments_into", "job_id", "into_round", "into_number", **_where("into_round IS NOT NULL")),
        sa.Index("ix_assignments_job_id_client_id_round", "job_id", "client_id", "round"),
        sa.Index("ix_assignments_job_id_reported_revision", "job_id", "reported_revision"),
        sa.Index("ix_assignments_open", "job_id", **_where("state IN ('TRAINING', 'UPLOADING', 'REPORTED')")),
    )


def _create_versions() -> None:
    op.create_table(
        "model_versions",
        sa.Column("job_id", sa.String(), sa.ForeignKey("jobs.job_id"), nullable=False),
        *_required(sa.Integer(), "version", "round", "attempt"),
        sa.Column("digest", sa.String(), nullable=False, index=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state_digest", sa.String(), nullable=False),
        sa.Column("num_updates", sa.Integer(), nullable=False),
        *_required(sa.Float(), "total_weight", "created_unix_s"),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("delta_digest", sa.String(), nullable=False, index=True, server_default=""),
        sa.Column("delta_size_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("delta_base", sa.String(), nullable=False, server_default=""),
        sa.Column("restored_from", sa.Integer()),
        sa.Column("model_removed_unix_s", sa.Float()),
        sa.Column("state_removed_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("job_id", "version"),
        sa.Index("uq_model_versions_round", "job_id", "round", unique=True, **_where("round > 0")),
    )


def _create_history() -> None:
    op.create_table(
        "history",
        sa.Column("sequence", _SEQUENCE, primary_key=True),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.Column("job_id", sa.String(), sa.ForeignKey("jobs.job_id"), nullable=False),
        *_required(sa.String(), "entity", "from_state", "to_state"),
        *_required(sa.Integer(), "round", "attempt"),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("update_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("norm", sa.Float()),
        sa.Index("ix_history_job_id_sequence", "job_id", "sequence"),
    )


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("job_id", sa.String(), nullable=False),
        *_required(sa.Integer(), "version", "round"),
        sa.Column("mechanism", sa.Text(), nullable=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "version"),
        sa.ForeignKeyConstraint(["job_id", "version"], ["model_versions.job_id", "model_versions.version"]),
    )
    op.create_table(
        "populations",
        sa.Column("population", sa.String(), primary_key=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("epsilon", sa.Float()),
        sa.Column("delta", sa.Float()),
    )
    op.create_table(
        "availability",
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("hour_unix_s", sa.Float(), nullable=False),
        *_required(sa.Integer(), "num_seen", "max_available"),
        sa.PrimaryKeyConstraint("population", "hour_unix_s"),
    )


def _create_operators() -> None:
    op.create_table(
        "operators",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False, unique=True),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("expires_unix_s", sa.Float()),
    )
    op.create_table(
        "audit_log",
        sa.Column("sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        *_required(sa.Text(), "actor", "action", "subject", "details"),
        *_required(sa.String(), "previous_hash", "hash"),
        sa.Index("ix_audit_log_action", "action", "sequence"),
        sa.Index("ix_audit_log_actor", "actor", "sequence"),
    )
    head = op.create_table(
        "audit_head",
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
    )
    op.bulk_insert(head, [{"num_rows": 0, "hash": "0" * 64}])


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        *_required(sa.String(), "type", "job_id", "job_name", "population", "client_id"),
        *_required(sa.Integer(), "round", "attempt"),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Index("ix_events_job_id_sequence", "job_id", "sequence"),
    )
    head = op.create_table("event_head", sa.Column("last_sequence", sa.BigInteger(), nullable=False))
    op.bulk_insert(head, [{"last_sequence": 0}])


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("sequence", _SEQUENCE, primary_key=True),
        sa.Column("webhook_id", sa.String(), nullable=False, unique=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("last_result", sa.Text(), nullable=False),
        sa.Column("last_unix_s", sa.Float()),
        sa.Column("failing_since_unix_s", sa.Float()),
    )
    op.create_table(
        "deliveries",
        sa.Column("event_sequence", sa.BigInteger(), nullable=False),
        sa.Column("webhook_id", sa.String(), sa.ForeignKey("webhooks.webhook_id"), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("last_unix_s", sa.Float()),
        sa.Column("next_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("event_sequence", "webhook_id"),
        sa.Index("ix_deliveries_pending", "webhook_id", "next_unix_s", "event_sequence", **_where("state = 'pending'")),
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), primary_key=True),
        *_required(sa.String(), "holder", "address"),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        *_required(sa.Float(), "renewed_unix_s", "expires_unix_s"),
    )
