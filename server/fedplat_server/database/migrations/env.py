"""The script that alembic runs for each command: the migrations, on the connection of `database.schema`.

A new step is a handwritten file `versions/NNNN_….py`; `tests/server/store/test_schema.py` prints its differences
from `database/tables.py`. There are no downgrades: restore the backup that was made before the upgrade.

Each step since 0019 states in `compatible_from` the oldest revision whose code can use the database after it. A step
that only adds (tables, nullable columns or ones with a server default, indexes) repeats that of the step before it, so
that daemons of the previous release continue during the upgrade. One that removes or changes what older code uses names
itself, and is allowed one release after the code has stopped to use it.
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
