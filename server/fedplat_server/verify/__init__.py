"""Checks of a database and its files against the invariants of the design, for the command `verify`.

`inspection` reads the database and combines all, `checks` adds those of the ledger and the audit log to
`fedplat.rounds.invariants`, and `files` checks the files. `fedplat_server.cli.prune` prints the report.
"""
