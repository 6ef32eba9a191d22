"""Options of several commands that need nothing of fedplat but its defaults: `fedplat --help` imports no more."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from fedplat.admin.patience import DEFAULT_TIMEOUT_S

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="Server to use. Default: FEDPLAT_SERVER, then the profile's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not 0.0 <= seconds < math.inf:
        raise typer.BadParameter(f"{seconds:g}: expected a number of seconds, 0 or more")
    return seconds


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=_finite,
        help="How long to retry while the server cannot be reached (unknown host name, refused connection, no "
        f"leader). Default: {DEFAULT_TIMEOUT_S:g}.",
    ),
]
StatusTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", callback=_finite, help="How long to wait for the server to answer. Default: 0."
    ),
]
AnyTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=_finite,
        help=f"How long to wait for the server to answer. Default: {DEFAULT_TIMEOUT_S:g} for job submit and job watch, "
        "0 for all other commands.",
    ),
]
