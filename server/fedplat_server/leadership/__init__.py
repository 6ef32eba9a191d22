"""Leader election among the daemons of one database."""
