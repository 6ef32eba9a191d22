"""`python -m fedplat_server` is `fedplat-server`."""

from fedplat_server.cli.main import main

main()
