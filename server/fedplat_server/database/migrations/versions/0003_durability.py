"""The data with which an attempt continues after a restart: deadlines, the order of reports, the id of the last save.

Revision: 0003.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("save_id", sa.String(), nullable=False, server_default=""))
    op.add_column("assignments", sa.Column("assigned_unix_s", sa.Float(), nullable=False, server_default="0"))
    op.add_column("assignments", sa.Column("deadline_unix_s", sa.Float(), nullable=False, server_default="0"))
    op.add_column("assignments", sa.Column("report_number", sa.Integer()))
