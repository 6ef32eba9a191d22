"""The command `fedplat-server`."""
