"""`fedplat privacy`: what jobs promise, before and after they are run."""

from __future__ import annotations

import typer

from fedplat.cli import auditing, budgets, planning

app = typer.Typer(no_args_is_help=True, help="Plan what a private job promises, see what it costs, and bound it.")
app.command("plan")(planning.plan)
app.command("audit")(auditing.audit)
app.command("show")(budgets.show)
app.command("budget")(budgets.budget)
