"""The database, SQLite or PostgreSQL: `store` opens it, and has one class for each kind of record.

Records: `jobs`, `clients`, `ledger`. Their classes: `sql_jobs` (with `rows` and `writes`), `sql_clients`, `sql_audit`
(with the operators), `sql_ledger`, `sql_retention`, `sql_leases`. Below them: `tables` and their `schema` version;
`transactions` and `engine` run SQL.
"""
