"""`python -m fedplat_server` is `fedplat-server`."""

from fedplat_server.cli import main

main()
