"""The operator's command `fedplat` (extra "cli"). Programs use `fedplat.admin` instead.

Only the command requires typer, rich and platformdirs; the module `submission` does not.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command with the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not be an error
    try:
        from fedplat.cli.app import app
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: the command fedplat needs {missing}; install it with: pip install 'fedplat[cli]'\n")
        sys.exit(2)
    app(prog_name="fedplat")
