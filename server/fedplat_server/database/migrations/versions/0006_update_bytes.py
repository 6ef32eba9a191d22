"""How many bytes each update had when it was received.

Revision: 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for table in ("assignments", "history"):
        op.add_column(table, sa.Column("update_bytes", sa.BigInteger(), nullable=False, server_default="0"))
