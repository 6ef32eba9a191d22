"""What follows release 0.1.0.

The id of the database, with which it owns its models and updates in folders and object stores. What clients send in
secure aggregations, their places on rosters, and how many updates an unmasked sum has. What the protocol of a job keeps
between its attempts. Versions of which the server has the digest only.

Revision: 0024.
"""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0019"
compatible_from = "0019"


def upgrade() -> None:
    identity = op.create_table("database_identity", sa.Column("database_id", sa.String(), nullable=False))
    op.bulk_insert(identity, [{"database_id": uuid.uuid4().hex}])
    _create_secure_messages()
    op.add_column("attempts", sa.Column("num_survivors", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("assignments", sa.Column("secure_group", sa.Integer()))
    op.add_column("assignments", sa.Column("secure_position", sa.Integer()))
    op.add_column("jobs", sa.Column("protocol", sa.JSON(none_as_null=True)))
    op.add_column(
        "model_versions", sa.Column("is_held_by_clients", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def _create_secure_messages() -> None:
    assignment = ["job_id", "round", "number", "client_id"]
    op.create_table(
        "secure_messages",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint(*assignment, "kind"),
        sa.ForeignKeyConstraint(assignment, [f"assignments.{name}" for name in assignment]),
    )
