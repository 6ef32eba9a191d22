"""The bytes of small updates and blobs.

Older code neither reads nor writes them; what it leaves there, the next start of a daemon that knows them removes.

Revision: 0025.
"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
compatible_from = "0019"


def upgrade() -> None:
    assignment = ["job_id", "round", "number", "client_id"]
    op.create_table(
        "update_contents",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(*assignment),
        sa.ForeignKeyConstraint(assignment, [f"assignments.{name}" for name in assignment]),
    )
    op.create_table(
        "blob_contents",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
