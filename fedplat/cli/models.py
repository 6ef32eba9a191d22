"""`fedplat model ...`."""

from __future__ import annotations

import typer

from fedplat.cli import formats, lists, model_export, options
from fedplat.cli.lists import LimitOption, WatchableCommand, WatchOption
from fedplat.cli.output import ListColumn, ListLayout
from fedplat.cli.session import FormatOption, JobArgument, session
from fedplat.command_line.with_typer import make_group
from fedplat.wire.v1 import admin_pb2

app = make_group("List and export a job's model versions.")


LAYOUT = ListLayout[admin_pb2.ModelVersion](
    lambda version: str(version.model.version),
    (
        ListColumn("#VERSION", lambda version: str(version.model.version)),
        ListColumn("#ROUND", lambda version: str(version.round)),
        ListColumn("#UPDATES", lambda version: str(version.num_updates)),
        ListColumn("#WEIGHT", lambda version: _weight(version), is_wide=True),
        ListColumn("#SIZE", lambda version: formats.size(version.model.size_bytes)),
        ListColumn("#DELTA", lambda version: _delta_size(version), is_wide=True),
        ListColumn("CREATED", lambda version: formats.moment(version.created_unix_s)),
        ListColumn("FILES", lambda version: _files(version)),
        ListColumn("SHA256", lambda version: version.model.digest[:12], is_wide=True),
        ListColumn("METRICS", lambda version: formats.metrics(version.metrics, {})),
    ),
)


@app.command("list", cls=WatchableCommand)
def list_versions(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    job: JobArgument,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """List the model versions of a job."""
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.ModelVersion](
            command.client.page,
            admin_pb2.ListModelVersionsRequest(job=job),
            lambda page: page.versions,
            "no versions yet",
        )
        lists.show(command, query, LAYOUT, limit, watch)


def _weight(version: admin_pb2.ModelVersion) -> str:
    return f"{version.total_weight:.6g}" if version.total_weight or not version.num_updates else formats.NOTHING


def _delta_size(version: admin_pb2.ModelVersion) -> str:
    return formats.size(version.delta_size_bytes) if version.delta_size_bytes else formats.NOTHING


def _files(version: admin_pb2.ModelVersion) -> str:
    """Describe the files of a version that are kept, and the version that it repeats."""
    kept = "removed" if version.model_removed_unix_s else "model"
    if version.held_by_clients:
        kept = "at the clients"
    if version.has_state:
        kept += ", state"
    return kept + (f" (restored from {version.restored_from})" if version.HasField("restored_from") else "")


app.command("export")(model_export.export_model)
