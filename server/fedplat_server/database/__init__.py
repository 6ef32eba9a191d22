"""The database, SQLite or PostgreSQL: `store` opens it, and has one class for each kind of record.

`records` are those of jobs, clients and private releases. Their classes: `sql_jobs` (with `rows` and `writes`),
`sql_clients`, `sql_audit` (with events and operators), `sql_ledger`, `sql_retention`. Below them: `tables` and their
`schema` version; `transactions` and `engine` run SQL.
"""
