"""The script that alembic runs for each command: the migrations, on the connection of `database.schema`.

A new step is a handwritten file `versions/NNNN_….py`; `tests/server/store/test_schema.py` prints its differences
from `database/tables.py`. There are no downgrades: restore the backup that was made before the upgrade.
"""

from alembic import context

from fedplat_server.database import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
)
with context.begin_transaction():
    context.run_migrations()
