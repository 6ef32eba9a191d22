"""The commands in blocks of shell: found, and read by the parsers of the real programs."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path

import click
import typer.main

from fedplat.cli.app import app
from fedplat_client.commands import main as client
from fedplat_server.cli.commands import app as server

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS: dict[str, click.Command] = {
    "fedplat": typer.main.get_command(app),
    "fedplat-server": typer.main.get_command(server),
    "fedplat-client": client,
}
FOLDERS = {"fedplat": ".", "fedplat-server": "server", "fedplat-client": "client"}
SEPARATORS = re.compile(r"[();&|]+")
NO_COMMANDS = {"do", "done", "for", "export", "trap"}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command; `program` is what checks it ("" if nothing does), and `rest` what comes after its name."""

    words: tuple[str, ...]
    program: str = ""
    rest: tuple[str, ...] = ()


def find(text: str) -> list[CommandLine]:
    """Finds the commands of a shell script: between separators, without redirections, variables and ellipses."""
    found: list[CommandLine] = []
    for line in text.replace("\\\n", " ").splitlines():
        tokens = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        tokens.whitespace_split = True
        words: list[str] = []
        for token in [*tokens, ";"]:
            if not SEPARATORS.fullmatch(token):
                words.append(token)
                continue
            found += _read(words)
            words = []
    return found


def _read(words: list[str]) -> list[CommandLine]:
    for at in [at for at, word in enumerate(words) if word in (">", "<")][::-1]:
        del words[at : at + 2]
    words = [word for word in words if word != "..."]
    while words and (words[0] in ("do", "export") or re.match(r"\w+=", words[0])):
        words.pop(0)
    if not words or words[0] in NO_COMMANDS:
        return []
    inner = words
    if words[0] in ("docker", "kubectl") and "exec" in words:
        after = words.index("--") if "--" in words else words.index("exec") + 1
        start = next((at for at, word in enumerate(words) if word in PROGRAMS and at > after), None)
        inner = words[start:] if start else words
    if words[0] == "xargs":
        inner = [*words[words.index("fedplat") :], "PIPED"]
    is_known = inner[0] in (*PROGRAMS, "pip", "make")
    return [CommandLine(tuple(words), inner[0] if is_known else "", tuple(inner[1:]))]


def check(command: CommandLine) -> str:
    """Returns what is wrong with a command, or "" if its program would accept it, or if nothing here knows it."""
    if command.program == "pip":
        return _check_pip(command.rest)
    if command.program == "make":
        makefile = (ROOT / "Makefile").read_text()
        unknown = [word for word in command.rest if not re.search(rf"^{word}:", makefile, re.MULTILINE)]
        return f"there is no target {unknown[0]}" if unknown else ""
    if not command.program:
        return ""
    try:
        _parse(PROGRAMS[command.program], command.program, command.rest)
    except click.ClickException as exc:
        return exc.format_message()
    return ""


def _parse(command: click.Command, name: str, words: tuple[str, ...]) -> None:
    """Reads options and arguments as click does, but calls nothing, and lets files be absent."""
    context = click.Context(command, info_name=name)
    given, rest, _ = command.make_parser(context).parse_args(list(words))
    for parameter in command.get_params(context):
        value = given.get(str(parameter.name))
        if not isinstance(value, (str, bool, int, list, tuple)):  # click's marks for an absent value
            if parameter.required and not isinstance(command, click.Group) and parameter.default is None:
                raise click.MissingParameter(ctx=context, param=parameter)
        elif not isinstance(parameter.type, click.Path):
            parameter.type_cast_value(context, value)
    if not isinstance(command, click.Group):
        if rest:
            raise click.UsageError(f"unexpected argument {rest[0]}")
        return
    if not rest:
        return
    found = command.get_command(context, rest[0])
    if found is None:
        raise click.UsageError(f"there is no command {rest[0]}")
    _parse(found, f"{name} {rest[0]}", tuple(rest[1:]))


def _check_pip(words: tuple[str, ...]) -> str:
    for word in words[1:]:
        requirement = re.fullmatch(r"(fedplat(?:-server|-client)?|\.(?:/server|/client)?)(?:\[([\w,]+)\])?", word)
        if requirement is None:
            continue
        name, extras = requirement.groups()
        project = tomllib.loads((ROOT / FOLDERS.get(name, name) / "pyproject.toml").read_text())["project"]
        unknown = set((extras or "").split(",")) - {"", *project.get("optional-dependencies", {})}
        if unknown:
            return f"{name} has no extra {', '.join(sorted(unknown))}"
    return ""
