"""Jobs keep the clocks of their clients (stale synchronous parallel training).

Revision: 0022.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
compatible_from = "0019"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("clocks", sa.JSON(none_as_null=True)))
