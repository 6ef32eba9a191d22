"""The daemons of tests/server, for tests about the network."""

from support.fixtures import empty_database, folder, site, weather

__all__ = ["empty_database", "folder", "site", "weather"]
