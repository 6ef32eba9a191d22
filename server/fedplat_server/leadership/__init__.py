"""The election of the daemon that leads the jobs."""
