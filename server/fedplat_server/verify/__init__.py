"""Checks a database and its files at rest against the invariants of the design; the operator's `verify`.

`inspection` reads the database, `checks` adds those of the ledger and the audit log to `fedplat.rounds.invariants`,
`files` and `spool` check the bytes, `checker` puts them together, `command` prints.
"""
