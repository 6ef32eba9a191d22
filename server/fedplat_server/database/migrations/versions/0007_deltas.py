"""The delta that leads to a model version from the one before.

Revision: 0007.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for column in (
        sa.Column("delta_digest", sa.String(), nullable=False, server_default=""),
        sa.Column("delta_size_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("delta_base", sa.String(), nullable=False, server_default=""),
    ):
        op.add_column("model_versions", column)
    op.create_index("ix_model_versions_delta_digest", "model_versions", ["delta_digest"])
