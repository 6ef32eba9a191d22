"""The operator's command `fedplat` (extra "cli"). Programs use `fedplat.admin` instead.

Only the command requires typer, rich and platformdirs; the module `job_files` does not.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from fedplat import forks
from fedplat.command_output import checked_output

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command with the arguments of this process.

    SIGTERM and SIGHUP end it as Ctrl-C does, so that a command removes what it has begun.
    """
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        raise KeyboardInterrupt

    numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one
    handled = [each for each in numbers if signal.getsignal(each) is signal.SIG_DFL]
    with forks.keep_signals(handled):
        try:
            for number in handled:
                signal.signal(number, interrupt)
            _run()
        except KeyboardInterrupt:  # before the command has begun
            sys.exit(128 + received[0] if received else _INTERRUPTED)
        except SystemExit as exc:
            if received and exc.code == _INTERRUPTED:
                sys.exit(128 + received[0])
            raise
        finally:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)


def _run() -> None:
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] -- the caller has closed it
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show must not be an error
    try:
        from fedplat.cli.app import app

        with checked_output("error"):
            app(prog_name="fedplat")
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        from fedplat.extras import install_command

        sys.stderr.write(f"error: the command fedplat needs {missing}; install it with: {install_command('cli')}\n")
        sys.exit(2)
