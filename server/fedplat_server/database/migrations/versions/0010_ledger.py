"""Private jobs: their calibrated options, the ledger of their releases, and budgets of populations.

Revision: 0010.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("privacy", sa.JSON()))
    op.create_table(
        "ledger",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("mechanism", sa.Text(), nullable=False),
        sa.Column("unix_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "version", name="pk_ledger"),
        sa.ForeignKeyConstraint(
            ["job_id", "version"],
            ["model_versions.job_id", "model_versions.version"],
            name="fk_ledger_model_versions",
        ),
    )
    op.create_table(
        "populations",
        sa.Column("population", sa.String(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("epsilon", sa.Float()),
        sa.Column("delta", sa.Float()),
        sa.PrimaryKeyConstraint("population", name="pk_populations"),
    )
