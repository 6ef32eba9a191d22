"""`fedplat model ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import FAILED, WRONG_USAGE, JobArgument, JsonOption, LimitOption, ServerOption, session
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="List and export a job's model versions.", rich_markup_mode=None)


@app.command("list")
def list_versions(
    context: typer.Context,
    job: JobArgument,
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the model versions of a job."""
    with session(context, server, as_json) as command:
        versions = command.client.iter_versions(job, limit)
        if command.output.as_json:
            command.output.records(versions)
            return
        rows = (
            (
                str(version.model.version),
                str(version.round),
                str(version.num_updates),
                f"{version.total_weight:.6g}" if version.total_weight or not version.num_updates else formats.NOTHING,
                formats.size(version.model.size_bytes),
                formats.size(version.delta_size_bytes) if version.delta_size_bytes else formats.NOTHING,
                formats.moment(version.created_unix_s),
                _files(version),
                version.model.digest[:12],
                formats.metrics(version.metrics, {}),
            )
            for version in versions
        )
        columns = (
            "#VERSION",
            "#ROUND",
            "#UPDATES",
            "#WEIGHT",
            "#SIZE",
            "#DELTA",
            "CREATED",
            "FILES",
            "SHA256",
            "METRICS",
        )
        command.output.table(columns, rows, "no versions yet")


def _files(version: admin_pb2.ModelVersion) -> str:
    """Describe the files of a version that are kept, and the version that it repeats."""
    kept = "removed" if version.model_removed_unix_s else "model"
    if version.has_state:
        kept += ", state"
    return kept + (f" (restored from {version.restored_from})" if version.HasField("restored_from") else "")


@app.command("export")
def export_model(
    context: typer.Context,
    job: JobArgument,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write (safetensors).")],
    version: Annotated[
        int | None,
        typer.Option(min=0, max=2**32 - 1, metavar="N", help="Version, 0 for the initial model. Default: the latest."),
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export a model version to a safetensors file.

    The received bytes are checked against the version's digest.
    """
    with session(context, server, as_json) as command:
        try:
            if output.is_dir() or not output.absolute().parent.is_dir():
                command.output.error(f"--output is {output}; expected a file in an existing folder")
                raise typer.Exit(WRONG_USAGE)
            with command.output.transfer("downloading the model") as progress:
                model = command.client.export_model(job, version, output, progress)
        except OSError as exc:
            command.output.error(f"{output} cannot be written: {exc.strerror or exc}")
            raise typer.Exit(FAILED) from exc
        if command.output.as_json:
            command.output.json(to_record(model) | {"path": str(output)})
            return
        command.output.line(f"wrote version {model.version} ({formats.size(model.size_bytes)}) to {output}")
