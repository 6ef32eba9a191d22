"""The oldest code that may use the database, so that daemons of two versions can share it while they are replaced.

Revision: 0019.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
compatible_from = "0019"


def upgrade() -> None:
    op.create_table("schema_compatibility", sa.Column("compatible_from", sa.String(), nullable=False))
