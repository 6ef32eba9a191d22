"""`fedplat privacy`: what jobs promise, before and after they are run."""

from __future__ import annotations

import typer

from fedplat.cli import auditing, planning

app = typer.Typer(no_args_is_help=True, help="Plan what a private job promises, and check it.")
app.command("plan")(planning.plan)
app.command("audit")(auditing.audit)
