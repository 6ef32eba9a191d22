"""Checks of a database and its files against the invariants of the design, for the command `verify`.

`inspection` reads the database, `checks` adds those of the ledger and the audit log to `fedplat.rounds.invariants`,
`files` checks the files, and `checker` combines them. `fedplat_server.cli.prune` prints the report.
"""
