"""The lease by which one of several daemons leads.

Revision: 0004.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("renewed_unix_s", sa.Float(), nullable=False),
        sa.Column("expires_unix_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
