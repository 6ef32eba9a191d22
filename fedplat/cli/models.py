"""`fedplat model ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import FAILED, WRONG_USAGE, JobArgument, JsonOption, LimitOption, ServerOption, session
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="List and export a job's models.", rich_markup_mode=None)


@app.command("list")
def list_versions(
    context: typer.Context,
    job: JobArgument,
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the model versions of a job."""
    with session(context, server, as_json) as here:
        versions = here.client.iter_versions(job, limit)
        if here.output.as_json:
            here.output.records(versions)
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
        here.output.table(columns, rows, "no versions yet")


def _files(version: admin_pb2.ModelVersion) -> str:
    """Which files of a version are kept, and whose bytes they are."""
    kept = "removed" if version.model_removed_unix_s else "model"
    if version.has_state:
        kept += ", state"
    return kept + (f" (version {version.restored_from} again)" if version.HasField("restored_from") else "")


@app.command("export")
def export_model(
    context: typer.Context,
    job: JobArgument,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it (safetensors).")],
    version: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, metavar="N", help="0 is the initial model; else the latest.")
    ] = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model version to a file, checked."""
    with session(context, server, as_json) as here:
        try:
            if output.is_dir() or not output.absolute().parent.is_dir():
                here.output.error(f"--output is {output}; expected a file in a folder that exists")
                raise typer.Exit(WRONG_USAGE)
            with here.output.transfer("receiving the model") as progress:
                model = here.client.export_model(job, version, output, progress)
        except OSError as exc:
            here.output.error(f"{output} cannot be written: {exc.strerror or exc}")
            raise typer.Exit(FAILED) from exc
        if here.output.as_json:
            here.output.json(to_record(model) | {"path": str(output)})
            return
        here.output.line(f"version {model.version} ({formats.size(model.size_bytes)}) is in {output}")
