"""Client authentication: tickets, signed requests and certificates."""
