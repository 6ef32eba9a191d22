"""Assignments and their history keep the L2 norm of the reported update.

Revision: 0012.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("assignments", sa.Column("norm", sa.Float()))
    op.add_column("history", sa.Column("norm", sa.Float()))
