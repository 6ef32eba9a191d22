"""Operators, and the audit log with its head.

Revision: 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "operators",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_unix_s", sa.Float(), nullable=False),
        sa.Column("expires_unix_s", sa.Float()),
        sa.PrimaryKeyConstraint("name", name="pk_operators"),
        sa.UniqueConstraint("token_hash", name="uq_operators_token_hash"),
    )
    op.create_table(
        "audit_log",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("previous_hash", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit_log"),
    )
    head = op.create_table(
        "audit_head",
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
    )
    op.bulk_insert(head, [{"num_rows": 0, "hash": "0" * 64}])
