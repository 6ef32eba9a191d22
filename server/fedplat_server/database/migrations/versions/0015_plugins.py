"""Jobs keep the versions of their plugins.

Revision: 0015.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    # NULL: the job was created before servers had plugins.
    op.add_column("jobs", sa.Column("plugins", sa.JSON(none_as_null=True)))
