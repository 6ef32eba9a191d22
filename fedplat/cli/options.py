"""Options of several commands that need nothing of fedplat but its defaults: `fedplat --help` imports no more."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from fedplat.admin.patience import DEFAULT_TIMEOUT_S
from fedplat.command_line.with_typer import read_duration

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="Server to use. Default: FEDPLAT_SERVER, then the profile's."),
]
AUTO: Final = "auto"
TransportOption = Annotated[
    Literal["auto", "grpc", "http"],
    typer.Option(
        "--transport",
        envvar="FEDPLAT_TRANSPORT",
        help="What the server speaks at its address: gRPC, or HTTP/1.1 (its --http-listen, with --http-operators). "
        "auto is the profile's choice, gRPC by default.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=read_duration,
        help="How long to retry while the server cannot be reached (unknown host name, refused connection, no "
        f"leader). Default: {DEFAULT_TIMEOUT_S:g}s.",
    ),
]
StatusTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=read_duration,
        help="How long to wait for the server to answer. Default: 0.",
    ),
]
AnyTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        envvar="FEDPLAT_TIMEOUT",
        metavar="DURATION",
        parser=read_duration,
        help=f"How long to wait for the server to answer. Default: {DEFAULT_TIMEOUT_S:g}s for job submit and job "
        "watch, 0 for all other commands.",
    ),
]
CheckpointOption = Annotated[
    float,
    typer.Option(
        "--checkpoint-every",
        metavar="DURATION",
        parser=read_duration,
        help="Time between checkpoints of a run, from which it is resumed.",
    ),
]
