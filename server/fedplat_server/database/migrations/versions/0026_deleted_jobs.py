"""The time at which an operator has deleted a job, whose rows are then removed in parts.

Older code shows such a job, which has ended, as long as its row is there: without history, then without files.

Revision: 0026.
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
compatible_from = "0019"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("deleted_unix_s", sa.Float()))
