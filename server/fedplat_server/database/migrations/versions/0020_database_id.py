"""The id of the database, with which it owns its models and updates in folders and object stores.

Revision: 0020.
"""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
compatible_from = "0019"


def upgrade() -> None:
    identity = op.create_table("database_identity", sa.Column("database_id", sa.String(), nullable=False))
    op.bulk_insert(identity, [{"database_id": uuid.uuid4().hex}])
