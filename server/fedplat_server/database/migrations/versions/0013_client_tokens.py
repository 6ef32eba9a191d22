"""The enrollment token of each client; unknown for existing clients.

Revision: 0013.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("clients", sa.Column("token_id", sa.String(), nullable=False, server_default=""))
    op.create_index("ix_clients_token_id", "clients", ["token_id"])
