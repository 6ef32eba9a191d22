"""Groups of commands: they suggest a command once, and take the old spellings of options for one release."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from typing_extensions import override

if TYPE_CHECKING:
    import click

    _Group = click.Group
else:
    _Group = object

Renamed: TypeAlias = Mapping[str, Mapping[str, str]]
"""The old and the new names of the options of commands: `{"job list": {"--status": "--state"}}`."""
HELP_SETTINGS: Mapping[str, Any] = {"help_option_names": ["-h", "--help"]}
"""The settings of a program's context; its commands have them, too."""
_JSON_FORMATS = ("json", "jsonl")
REMOVAL = "0.3"
"""The release without the old names of 0.1."""


class SuggestingGroup(_Group):
    """A group of commands that names similar ones if there is no such command."""

    renamed: ClassVar[Renamed] = {}
    """The old names of options of this program; only that of its root is read."""

    @override
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            close = difflib.get_close_matches(name, self.list_commands(ctx))
            ctx.fail(f"No such command '{name}'.{f' Did you mean {_join(close)}?' if close else ''}")
        if ctx.parent is None:
            args, notes = rename_options(args, self.renamed)
            if notes and not ctx.resilient_parsing and not (ctx.params.get("as_json") or _wants_json(self, ctx, args)):
                sys.stderr.writelines(f"warning: {note}\n" for note in notes)
        return super().resolve_command(ctx, args)


def _join(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def rename_options(args: Sequence[str], renamed: Renamed) -> tuple[list[str], list[str]]:
    """Return a command line with the new names of options, and a note for each old one.

    >>> rename_options(["job", "list", "--status=RUNNING"], {"job list": {"--status": "--state"}})
    (['job', 'list', '--state=RUNNING'], ['--status is now --state; the old name works until 0.3'])
    """
    paths = (" ".join(args[:count]) for count in (2, 1))
    names = next((renamed[path] for path in paths if path in renamed), {})
    found: list[str] = []
    notes: list[str] = []
    end = args.index("--") if "--" in args else len(args)
    for word in args[:end]:
        old, rest = _split(word, names)
        if old:
            notes.append(f"{old} is now {names[old]}; the old name works until {REMOVAL}")
        found.append(f"{names[old]}{rest}" if old else word)
    return [*found, *args[end:]], list(dict.fromkeys(notes))


def _split(word: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the old name in a word, or "", and what follows it: `=value`, or nothing."""
    name, equals, value = word.partition("=")
    if name in names:
        return name, equals + value
    if word[:2] in names and not word.startswith("--"):  # -oDIR
        return word[:2], f"={word[2:]}"
    return "", ""


def _wants_json(root: Any, ctx: click.Context, args: Sequence[str]) -> bool:
    """Return whether the options of a command line, which may have mistakes, ask for JSON."""
    command, words = root, list(args)
    while words and hasattr(command, "get_command"):
        command = command.get_command(ctx, words.pop(0))
    if command is None:
        return False
    tolerant = command.context_class(command, parent=ctx, resilient_parsing=True)
    given, _, _ = command.make_parser(tolerant).parse_args(words)
    return any(
        bool(given.get(option.name)) if "--json" in option.opts else given.get(option.name) in _JSON_FORMATS
        for option in command.params
        if not {"--json", "--output"}.isdisjoint(option.opts)
    )
