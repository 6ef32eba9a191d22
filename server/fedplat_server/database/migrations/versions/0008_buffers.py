"""The base version of an assignment, and the attempt that accepted its update, if that was a later one.

Revision: 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
_BASE = """
    UPDATE assignments SET base_version = (
        SELECT base_version FROM attempts
        WHERE attempts.job_id = assignments.job_id
        AND attempts.round = assignments.round AND attempts.number = assignments.number
    )
"""


def upgrade() -> None:
    for column in (
        sa.Column("base_version", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("staleness", sa.Integer()),
        sa.Column("into_round", sa.Integer()),
        sa.Column("into_number", sa.Integer()),
    ):
        op.add_column("assignments", column)
    op.execute(_BASE)
    op.execute("UPDATE assignments SET staleness = 0 WHERE reported_revision IS NOT NULL")
    later = sa.text("into_round IS NOT NULL")
    still = sa.text("state IN ('TRAINING', 'UPLOADING', 'REPORTED')")
    op.create_index(
        "ix_assignments_into",
        "assignments",
        ["job_id", "into_round", "into_number"],
        sqlite_where=later,
        postgresql_where=later,
    )
    op.create_index("ix_assignments_open", "assignments", ["job_id"], sqlite_where=still, postgresql_where=still)
