"""The database behind a port: `port` says what it does, `sql` does it; `fedplat_server.testing` does it in memory."""
