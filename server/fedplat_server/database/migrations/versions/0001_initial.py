"""The first schema: clients, jobs, attempts, assignments, model versions, history.

Revision: 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _clients()
    _jobs()
    _attempts()
    _assignments()
    _model_versions()
    _history()


def _sequence() -> sa.Column[int]:
    return sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True)


def _clients() -> None:
    op.create_table(
        "clients",
        _sequence(),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("software_version", sa.Text(), nullable=False),
        sa.Column("credential_hash", sa.LargeBinary(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("enrolled_unix_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_clients"),
        sa.UniqueConstraint("client_id", name="uq_clients_client_id"),
        sa.UniqueConstraint("credential_hash", name="uq_clients_credential_hash"),
        sa.UniqueConstraint("idempotency_key", name="uq_clients_idempotency_key"),
    )
    op.create_index("ix_clients_population", "clients", ["population"])


def _jobs() -> None:
    op.create_table(
        "jobs",
        _sequence(),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("job_file", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("latest_version", sa.Integer(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_jobs"),
        sa.UniqueConstraint("job_id", name="uq_jobs_job_id"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )


def _attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("goal", sa.Integer(), nullable=False),
        sa.Column("minimum", sa.Integer(), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("opened_unix_s", sa.Float(), nullable=False),
        sa.Column("ended_unix_s", sa.Float()),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "round", "number", name="pk_attempts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_attempts_jobs"),
    )
    one_commit = sa.text("kind = 'TRAIN' AND phase = 'COMMITTED'")
    op.create_index(
        "uq_attempts_committed",
        "attempts",
        ["job_id", "round"],
        unique=True,
        sqlite_where=one_commit,
        postgresql_where=one_commit,
    )


def _assignments() -> None:
    op.create_table(
        "assignments",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String()),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("num_examples", sa.Float(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("took_s", sa.Float()),
        sa.Column("reported_revision", sa.BigInteger()),
        sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id", name="pk_assignments"),
        sa.UniqueConstraint("token_hash", name="uq_assignments_token_hash"),
        sa.ForeignKeyConstraint(
            ["job_id", "round", "number"],
            ["attempts.job_id", "attempts.round", "attempts.number"],
            name="fk_assignments_attempts",
        ),
    )
    op.create_index("ix_assignments_job_id_reported_revision", "assignments", ["job_id", "reported_revision"])


def _model_versions() -> None:
    op.create_table(
        "model_versions",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state_digest", sa.String(), nullable=False),
        sa.Column("num_updates", sa.Integer(), nullable=False),
        sa.Column("total_weight", sa.Float(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "version", name="pk_model_versions"),
        sa.UniqueConstraint("job_id", "round", name="uq_model_versions_job_id_round"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_model_versions_jobs"),
    )
    op.create_index("ix_model_versions_digest", "model_versions", ["digest"])


def _history() -> None:
    op.create_table(
        "history",
        _sequence(),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("entity", sa.String(), nullable=False),
        sa.Column("from_state", sa.String(), nullable=False),
        sa.Column("to_state", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_history"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_history_jobs"),
    )
    op.create_index("ix_history_job_id_sequence", "history", ["job_id", "sequence"])
