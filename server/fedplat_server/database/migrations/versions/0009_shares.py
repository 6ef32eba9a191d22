"""Index of a client's assignments in a job, for the participation check.

Revision: 0009.
"""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_index("ix_assignments_job_id_client_id_round", "assignments", ["job_id", "client_id", "round"])
