"""Several daemons on one database: one leads its jobs, the others are gateways to it."""
