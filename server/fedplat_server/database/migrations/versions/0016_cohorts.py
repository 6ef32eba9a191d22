"""Jobs keep the clients that their Flower app has drawn.

Revision: 0016.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("cohort", sa.JSON(none_as_null=True)))
