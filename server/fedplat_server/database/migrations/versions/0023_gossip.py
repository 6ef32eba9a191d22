"""Decentralised jobs: the state of their exchange, and versions of which the server has the digest only.

Revision: 0023.
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
compatible_from = "0019"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("gossip", sa.JSON(none_as_null=True)))
    op.add_column(
        "model_versions", sa.Column("is_held_by_clients", sa.Boolean(), nullable=False, server_default=sa.false())
    )
