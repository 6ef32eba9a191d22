"""Removal times of files and history, the source of versions that a rollback made, and when clients were last seen.

Revision: 0014.
"""

import time

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    for column in (
        sa.Column("restored_from", sa.Integer()),
        sa.Column("model_removed_unix_s", sa.Float()),
        sa.Column("state_removed_unix_s", sa.Float()),
    ):
        op.add_column("model_versions", column)
    op.add_column("attempts", sa.Column("history_removed_unix_s", sa.Float()))
    op.add_column("clients", sa.Column("seen_unix_s", sa.Float()))
    # Nothing tells when a client was here before: each may have been until now.
    seen = sa.text("UPDATE clients SET seen_unix_s = :now").bindparams(now=time.time())
    op.execute(seen)
