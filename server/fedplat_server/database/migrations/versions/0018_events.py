"""Events, webhooks and the deliveries of events to webhooks.

Revision: 0018.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    _create_events()
    _create_webhooks()


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("job_name", sa.String(), nullable=False),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_events"),
    )
    op.create_index("ix_events_job_id_sequence", "events", ["job_id", "sequence"])
    head = op.create_table("event_head", sa.Column("last_sequence", sa.BigInteger(), nullable=False))
    op.bulk_insert(head, [{"last_sequence": 0}])


def _create_webhooks() -> None:
    sequence = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "webhooks",
        sa.Column("sequence", sequence, autoincrement=True, nullable=False),
        sa.Column("webhook_id", sa.String(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("types", sa.JSON(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("last_result", sa.Text(), nullable=False),
        sa.Column("last_unix_s", sa.Float()),
        sa.Column("failing_since_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("sequence", name="pk_webhooks"),
        sa.UniqueConstraint("webhook_id", name="uq_webhooks_webhook_id"),
    )
    op.create_table(
        "deliveries",
        sa.Column("event_sequence", sa.BigInteger(), nullable=False),
        sa.Column("webhook_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("last_unix_s", sa.Float()),
        sa.Column("next_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("event_sequence", "webhook_id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.webhook_id"], name="fk_deliveries_webhooks"),
    )
    pending = sa.text("state = 'pending'")
    op.create_index(
        "ix_deliveries_pending",
        "deliveries",
        ["webhook_id", "next_unix_s", "event_sequence"],
        sqlite_where=pending,
        postgresql_where=pending,
    )
