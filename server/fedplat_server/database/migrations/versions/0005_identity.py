"""Enrollment tokens; clients have a public key instead of a credential, a session number and a revocation.

Clients that enrolled before have no key and cannot prove their identity: their rows are deleted, and they enroll again.

Revision: 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "enrolment_tokens",
        _sequence(),
        sa.Column("token_id", sa.String(), nullable=False),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False),
        sa.Column("num_uses", sa.Integer(), nullable=False),
        sa.Column("num_left", sa.Integer(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("expires_unix_s", sa.Float(), nullable=False),
        sa.Column("revoked_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("sequence", name="pk_enrolment_tokens"),
        sa.UniqueConstraint("token_id", name="uq_enrolment_tokens_token_id"),
        sa.UniqueConstraint("token_hash", name="uq_enrolment_tokens_token_hash"),
    )
    op.drop_table("clients")
    op.create_table(
        "clients",
        _sequence(),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("software_version", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("enrolled_unix_s", sa.Float(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("session_number", sa.BigInteger(), nullable=False),
        sa.Column("revoked_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("sequence", name="pk_clients"),
        sa.UniqueConstraint("client_id", name="uq_clients_client_id"),
        sa.UniqueConstraint("idempotency_key", name="uq_clients_idempotency_key"),
        sa.UniqueConstraint("public_key", name="uq_clients_public_key"),
    )
    op.create_index("ix_clients_population", "clients", ["population"])


def _sequence() -> sa.Column[int]:
    return sa.Column("sequence", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True)
