"""Run `fedplat-server` as `python -m fedplat_server`."""

from fedplat_server.cli.main import main

main()
