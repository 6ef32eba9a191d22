"""The funnel of attempts, the steps of assignments, the availability of populations, and filters of the audit log.

Revision: 0017.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    for name in ("num_checked_in", "num_eligible"):
        op.add_column("attempts", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    for name in ("downloaded_unix_s", "uploading_unix_s", "ended_unix_s"):
        op.add_column("assignments", sa.Column(name, sa.Float()))
    op.create_table(
        "availability",
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("hour_unix_s", sa.Float(), nullable=False),
        sa.Column("num_seen", sa.Integer(), nullable=False),
        sa.Column("max_available", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("population", "hour_unix_s", name="pk_availability"),
    )
    op.create_index("ix_audit_log_actor", "audit_log", ["actor", "sequence"])
    op.create_index("ix_audit_log_action", "audit_log", ["action", "sequence"])
