"""The database schema's history, one file for each step; `database.schema` applies them."""
