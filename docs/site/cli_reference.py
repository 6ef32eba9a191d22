"""Print docs/cli.md, the reference of all commands, from the commands themselves.

python docs/site/cli_reference.py > docs/cli.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import click
import typer.main

HEAD = """# Commands

This page lists the commands and options of `fedplat`, `fedplat-server` and `fedplat-client`. It is generated from the
programs (`make cli-reference`).

- `-h` or `--help` describes a command, `-V` or `--version` prints the version, and `version` also those of Python and
  of the protocol, and the extras.
- `--output FORMAT` (`-o`) is a format everywhere, and `--json` is short for `--output json`; `--dir` names a folder,
  `--to` a file.
- A DURATION is a number and a unit, such as `15s`, `10m` or `24h`; a number alone is one of seconds.
- Options of `fedplat-server run` and of `fedplat-client` are also keys of a TOML file
  ([`--config`](operations.md#variables-and-a-file-of-options---config)).
- [Old names](upgrading.md#options-with-new-names) of options work until 0.3.
- Completion: `fedplat --install-completion` and `fedplat-server --install-completion`; for bash,
  `eval "$(_FEDPLAT_CLIENT_COMPLETE=bash_source fedplat-client)"`, with `zsh_source` for zsh.

| exit status | `fedplat` | `fedplat-server` | `fedplat-client` |
|---|---|---|---|
| 0 | success | success | success |
| 1 | refused by the server, or a failed job | may be temporary, such as a data folder in use | a failure |
| 2 | a mistake in the command line or a file | the same | the same |
| 3 | the time of `job wait` is over | | |
| 4 | not logged in, or not allowed | | |
| 5 | the server cannot be reached | | |
| 130, 143 | Ctrl-C, SIGTERM | Ctrl-C, SIGTERM | Ctrl-C |
"""


def load_programs() -> dict[str, click.Command]:
    """Return the roots of the programs by name."""
    from fedplat.cli.app import app
    from fedplat_client.commands import main as client
    from fedplat_server.cli.commands import app as server

    return {
        "fedplat": typer.main.get_command(app),
        "fedplat-server": typer.main.get_command(server),
        "fedplat-client": client,
    }


def make_page() -> str:
    """Return the page."""
    lines = [HEAD]
    for name, command in load_programs().items():
        lines += _describe(name, command, 2)
    return "\n".join(lines).rstrip() + "\n"


def _describe(name: str, command: click.Command, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    yield _clean(command.help or "")
    context = click.Context(command, info_name=name)
    pieces = command.collect_usage_pieces(context)
    yield f"\nUsage: `{' '.join([name, *pieces])}`\n"
    rows = [row for parameter in command.params if (row := _row(parameter, context))]
    if rows:
        yield from (*_table([("option", "variable", "meaning"), ("---", "---", "---"), *rows]), "")
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            if found.hidden:
                continue
            yield from _describe(f"{name} {each}", found, 3)


def _table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a table, without the column of variables if it is empty."""
    has_variables = any(variable for _, variable, _ in rows[2:])
    for name, variable, text in rows:
        yield f"| {name} | {variable} | {text} |" if has_variables else f"| {name} | {text} |"


def _row(parameter: Any, context: click.Context) -> tuple[str, str, str] | None:
    if parameter.param_type_name != "option":
        text = getattr(parameter, "help", None)
        return (f"`{_cell(parameter.make_metavar(context))}`", "", _cell(text)) if text else None
    if parameter.hidden:
        return None
    names, text = parameter.get_help_record(context)
    text, _, extra = text.partition("  [")
    facts = [each for each in extra.removesuffix("]").split("; ") if each and not each.startswith("env var: ")]
    given = parameter.envvar or []
    variables = ", ".join(f"`{each}`" for each in ([given] if isinstance(given, str) else given))
    more = f" [{'; '.join(facts)}]" if facts else ""
    shown = re.sub(r"(, | / )(?=-)", r"`\1`", _cell(names))  # each name is code of its own
    return f"`{shown}`", variables, _cell(text + more)


def _cell(text: str) -> str:
    return _clean(text).replace("|", "\\|").replace("\n", " ")


def _clean(text: str) -> str:
    return text.replace("\b", "").replace("<", "&lt;").strip()


if __name__ == "__main__":
    sys.stdout.write(make_page())
