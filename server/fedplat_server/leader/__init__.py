"""The leading daemon: its parts are built from the database, execute the coordinator's commands, and handle calls."""
