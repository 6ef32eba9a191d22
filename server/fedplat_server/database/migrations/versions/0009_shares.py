"""All assignments of a client in a job, found at once: how often it took part is asked whenever it gets one.

Revision: 0009.
"""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_index("ix_assignments_job_id_client_id_round", "assignments", ["job_id", "client_id", "round"])
