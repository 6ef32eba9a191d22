"""The operator's command `fedplat` (extra "cli"). Programs use `fedplat.admin` instead.

Only the command requires typer, rich and platformdirs; the module `submission` does not.
"""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Run the command with the arguments of this process."""
    # gRPC's C library writes its own lines to stderr when a server goes away; our error message covers that.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not be an error
    try:
        from fedplat.cli.app import app
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        from fedplat.extras import install_command

        sys.stderr.write(f"error: the command fedplat needs {missing}; install it with: {install_command('cli')}\n")
        sys.exit(2)
    app(prog_name="fedplat")
