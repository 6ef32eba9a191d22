"""The script that alembic runs for each command: the migrations, on the connection of `database.schema`.

A new step is a handwritten file `versions/NNNN_….py`; `tests/server/store/test_schema.py` prints its differences
from `database/tables.py`. There are no downgrades: restore the backup that was made before the upgrade. The first step
makes the schema of the oldest release. Steps that are in no release yet may be merged into one, which keeps the number
of the last.

Each step states in `compatible_from` the oldest revision whose code can use the database after it. A step
that only adds ("expand": tables, nullable columns or ones with a server default, indexes that are not unique) repeats
that of the step before it, so that daemons of the previous release continue during the upgrade. A step that removes or
changes something ("contract") names the revision of the first release whose code no longer uses it. That release must
be out: the last release always continues during an upgrade. `tests/server/store/test_expansion.py` checks both.

Steps run while daemons work. On PostgreSQL the upgrade is one transaction, which waits at most a second for the lock of
a table and then starts again, but keeps the locks that it has until its end. So a step is short: it never rewrites or
fills a large table (the code does that, in small transactions), and an index of a large table does not belong in it.
Such an index needs `CREATE INDEX CONCURRENTLY` outside of the transaction (alembic's `autocommit_block`), for which
`schema.upgrade` would have to leave the transaction to alembic; no step has needed it yet.
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
