"""The database: `ports` declares its interface, `store` implements it for SQLite and PostgreSQL.

Records: `jobs`, `clients`, `ledger`. Adapters, one for each port: `sql_jobs` (with `rows` and `writes`), `sql_clients`,
`sql_operators`, `sql_audit`, `sql_ledger`, `sql_retention`, `sql_leases`. Below them: `tables` and their `schema`
version; `transactions`, `drivers` and `engine` run SQL.
"""
