"""`fedplat context ...`: the servers that an operator works with, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedplat import errors
from fedplat.admin import contexts, profile
from fedplat.cli import formats, lists
from fedplat.cli.lists import LimitOption
from fedplat.cli.options import JsonOption
from fedplat.cli.output import ListColumn, ListLayout, Output, to_record
from fedplat.cli.session import FormatOption, reporting
from fedplat.command_line.with_typer import make_group

app = make_group("Name the servers that you operate, and choose one.")
_STDIN = Path("-")
_FIRST = ("FEDPLAT_PROFILE", contexts.VARIABLE)
"""The variables that go before the context in use."""


def complete_contexts(incomplete: str) -> list[tuple[str, str]]:
    """Return the names of contexts that begin with a text, with their servers."""
    try:
        store = contexts.ContextStore.of_user()
        found = [store.describe(name) for name in store.names() if name.startswith(incomplete)]
    except (errors.ProfileError, OSError):
        return []
    return [(each.name, formats.printable(each.server)) for each in found]


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the context.", autocompletion=complete_contexts)
]
LAYOUT = ListLayout[contexts.NamedProfile](
    lambda each: each.name,
    (
        ListColumn("CURRENT", lambda each: "*" if each.is_current else ""),
        ListColumn("NAME", lambda each: each.name),
        ListColumn("SERVER", lambda each: each.server or formats.NOTHING),
        ListColumn("FILE", lambda each: each.path, is_wide=True),
    ),
)


@app.command("list")
def list_contexts(
    context: typer.Context, limit: LimitOption = None, form: FormatOption = None, as_json: JsonOption = False
) -> None:
    """List the contexts, and which one is in use.

    The context default is the profile that fedplat-server dev writes.
    """
    with reporting(context, as_json, form) as output:
        store = contexts.ContextStore.of_user()
        found = [store.describe(name) for name in store.names()]
        empty = "there are no contexts; add one with: fedplat context add NAME FILE"
        lists.show_rows(output, found, LAYOUT, empty, limit)
        if output.is_for_people:
            _warn(output, found)
            if found and not any(each.is_current for each in found):
                output.note(f"warning: the context in use, {store.current}, does not exist; fedplat context use NAME")


@app.command("use")
def use_context(context: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Use a context from now on, unless --context, --profile or their variables name another one."""
    with reporting(context, as_json) as output:
        used = contexts.ContextStore.of_user().use(name)
        _print(output, used, f"context {name} is in use: {used.server}")
        for variable in _FIRST:
            if os.environ.get(variable) and not output.as_json:
                output.note(f"warning: the variable {variable} is set, and goes before it")


@app.command("add")
def add_context(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new context.")],
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Profile, as fedplat operator add writes it; - reads it from stdin."),
    ],
    use: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Add a context: a copy of a profile, which only you can read.

    The profile has the address of the server, its certificates and your token.
    """
    with reporting(context, as_json) as output:
        store = contexts.ContextStore.of_user()
        store.locate(name)  # a mistake in the name comes before the input
        store.add(name, _read(file))
        added = store.use(name) if use else store.describe(name)
        more = "it is in use" if added.is_current else f"use it with: fedplat context use {name}"
        _print(output, added, f"added context {name}: {added.server}; {more}")


@app.command("remove")
def remove_context(context: typer.Context, name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove a context and its profile; its token stays valid until fedplat operator remove."""
    with reporting(context, as_json) as output:
        removed = contexts.ContextStore.of_user().remove(name)
        more = f"; {contexts.DEFAULT} is in use" if removed.is_current and name != contexts.DEFAULT else ""
        _print(output, removed, f"removed context {name}{more}")


def _read(file: Path) -> profile.Profile:
    if file != _STDIN:
        return profile.load(file)
    return profile.loads(sys.stdin.buffer.read(profile.MAX_BYTES + 1), "on stdin")


def _print(output: Output, found: contexts.NamedProfile, text: str) -> None:
    if output.as_json:
        output.json(to_record(found))
    else:
        output.line(text)
        _warn(output, [found])


def _warn(output: Output, found: Sequence[contexts.NamedProfile]) -> None:
    for each in found:
        if each.mistake:
            output.note(f"warning: context {each.name}: {each.mistake}")
