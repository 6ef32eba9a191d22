"""What clients send in secure aggregations, their places on rosters, and how many updates an unmasked sum has.

Revision: 0021.
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
compatible_from = "0019"


def upgrade() -> None:
    op.create_table(
        "secure_messages",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "round", "number", "client_id", "kind", name="pk_secure_messages"),
        sa.ForeignKeyConstraint(
            ["job_id", "round", "number", "client_id"],
            ["assignments.job_id", "assignments.round", "assignments.number", "assignments.client_id"],
            name="fk_secure_messages_assignments",
        ),
    )
    op.add_column("attempts", sa.Column("num_survivors", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("assignments", sa.Column("secure_group", sa.Integer()))
    op.add_column("assignments", sa.Column("secure_position", sa.Integer()))
