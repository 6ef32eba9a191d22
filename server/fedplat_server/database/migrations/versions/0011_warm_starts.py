"""A warm start commits a version in round 0, where the initial model is; every other round still has one version.

Revision: 0011.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    with op.batch_alter_table("model_versions") as table:
        table.drop_constraint("uq_model_versions_job_id_round", type_="unique")
    rounds = sa.text("round > 0")
    op.create_index(
        "uq_model_versions_round",
        "model_versions",
        ["job_id", "round"],
        unique=True,
        sqlite_where=rounds,
        postgresql_where=rounds,
    )
    op.drop_index("uq_attempts_committed", "attempts")
    one_commit = sa.text("kind IN ('TRAIN', 'WARM_START') AND phase = 'COMMITTED'")
    op.create_index(
        "uq_attempts_committed",
        "attempts",
        ["job_id", "round"],
        unique=True,
        sqlite_where=one_commit,
        postgresql_where=one_commit,
    )
