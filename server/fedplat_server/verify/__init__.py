"""Checks a database and its blobs at rest against the invariants of the design; the operator's `verify`.

`records` are what is read, `invariants` what must hold of them (pure), `histories` the same for the append-only
history, `files` the bytes, `checker` puts them together, `command` prints. `store.inspection` reads the database.
"""
