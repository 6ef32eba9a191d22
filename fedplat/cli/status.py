"""`fedplat status`: the server, its version, role, clients, jobs, disk and alerts."""

from __future__ import annotations

import typer

from fedplat.cli import formats, options
from fedplat.cli.session import FormatOption, own_timeout_s, session
from fedplat.wire.v1 import admin_pb2


def status(
    context: typer.Context,
    form: FormatOption = None,
    server: options.ServerOption = None,
    as_json: options.JsonOption = False,
    timeout: options.StatusTimeoutOption = None,
) -> None:
    """Show server status."""
    with session(context, server, as_json, own_timeout_s(context, timeout, 0.0), form=form) as command:
        state = command.patience.run(command.client, command.client.status)
        address = command.client.server
        command.output.show(state, address, lambda: {"server": address, **_fields(state)})
        if command.output.is_for_people:
            for alert in state.alerts:
                command.output.sentence(formats.alert(alert))


def _fields(state: admin_pb2.GetStatusResponse) -> dict[str, str]:
    jobs_by_state = ", ".join(f"{count} {name}" for name, count in sorted(state.num_jobs.items()))
    return {
        "connection": _connection(state),
        "version": f"{state.software_version} (protocol {state.protocol_version})",
        "role": _role(state),
        "process": str(state.process_id),
        "running for": formats.duration(state.uptime_s),
        "peak memory": formats.size(state.peak_rss_bytes),
        "clients": f"{state.num_clients} enrolled, {state.num_waiting} waiting, {state.num_busy} busy",
        "jobs": jobs_by_state or "none",
        "evaluators": ", ".join(state.evaluators) or "none",
        "trainers": ", ".join(state.trainers) or "none",
        "plugins": formats.plugins(state.plugins) or "none",
        "database": state.database,
        "disk": f"{formats.size(state.disk_free_bytes)} of {formats.size(state.disk_total_bytes)} free",
        "alerts": str(state.num_alerts or "none"),
    }


def _role(state: admin_pb2.GetStatusResponse) -> str:
    if not state.term:
        return "leader, the only daemon of its database"
    leader = f"{state.leader} at {state.leader_address}, term {state.term}"
    return f"gateway {state.gateway}; the leader is {leader}" if state.gateway else f"leader, {leader}"


def _connection(state: admin_pb2.GetStatusResponse) -> str:
    if state.insecure:
        return "WITHOUT TLS: anyone on the network can read everything, including models and tokens"
    until = formats.moment(state.certificate_expires_unix_s)
    return f"TLS, the server's certificate expires in {state.certificate_days_left:.0f} days ({until})"
