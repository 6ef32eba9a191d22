"""The database schema's history, one file for each step; `store.schema` applies them."""
