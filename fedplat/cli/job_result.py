"""`fedplat job result`: the result of a job with a procedure, as JSON, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplat import durable, texts
from fedplat.cli import options
from fedplat.cli import session as sessions
from fedplat.cli.session import JobArgument


def show_result(
    context: typer.Context,
    job: JobArgument,
    folder: Annotated[
        Path | None, typer.Option("--files", metavar="DIR", help="Write the files of the result to this folder.")
    ] = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print the result of a job with a procedure, as JSON."""
    with sessions.session(context, server, as_json) as command:
        found = command.client.result(job)
        command.output.line(found.to_json().decode())
        if folder is None:
            if found.files:
                count = texts.format_count(len(found.files), "file")
                command.output.note(f"the result has {count}, which --files DIR writes: {', '.join(found.files)}")
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in found.files.items():
                durable.write_bytes(folder / name, content, 0o666)
        except OSError as exc:
            command.output.error(f"{folder} cannot be written: {exc.strerror or exc}")
            raise typer.Exit(sessions.FAILED) from exc
        command.output.note(f"wrote {texts.format_count(len(found.files), 'file')} to {folder}")
