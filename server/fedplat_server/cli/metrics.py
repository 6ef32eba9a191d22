"""`fedplat-server metrics ...`: print the Grafana dashboard and the alert rules of the metrics."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedplat.command_line.with_typer import make_group
from fedplat_server.errors import ConfigError

app = make_group("Print the Grafana dashboard and the alert rules.")
Output = Annotated[
    Path | None, typer.Option("--to", metavar="FILE", help="Write to this file instead of the terminal.")
]


@app.command()
def grafana(output: Output = None) -> None:
    """Print the Grafana dashboard as JSON.

    Import it into Grafana, which asks for the Prometheus data source.
    """
    _write("fedplat.json", output)


@app.command()
def rules(output: Output = None) -> None:
    """Print the alert rules as YAML, for rule_files of Prometheus."""
    _write("fedplat.rules.yml", output)


def _write(name: str, output: Path | None) -> None:
    content = (resources.files("fedplat_server.metrics") / "grafana" / name).read_bytes()
    if output is None:
        sys.stdout.write(content.decode())
        return
    try:
        output.write_bytes(content)
    except OSError as exc:
        raise ConfigError(f"--to {output}: the file cannot be written: {exc.strerror}") from exc
