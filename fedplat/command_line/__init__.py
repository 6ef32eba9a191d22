"""What the programs `fedplat`, `fedplat-server` and `fedplat-client` have in common.

The classes are mixins of the commands and groups of click and of typer, and import neither: the client has only click,
and newer versions of typer have a click of their own.
"""
