"""`fedplat new`: a small project that can be simulated and deployed at once."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
import shlex
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli import options, output, session
from fedplat.config.toml import suggest
from fedplat.simulation.scenario import schema
from fedplat.texts import NAME_PATTERN

TEMPLATES: Mapping[str, tuple[str, str]] = {
    "numpy": ("[cli,plots,dashboard]", ""),
    "torch": ("[cli,plots,dashboard,torch]", "[torch]"),
    "sklearn": ("[cli,plots,dashboard,sklearn]", "[sklearn]"),
    "lightning": ("[cli,plots,dashboard,lightning]", "[lightning]"),
    "lora": ("[cli,plots,dashboard,huggingface]", "[huggingface]"),
}
"""The extras of fedplat and of fedplat-client that each template needs. Its files are in `templates/`."""
_COMMON = "common"
_RENAMED = {"gitignore": ".gitignore"}
"""Files that would have an effect in this repository under their own name."""


def new(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of the project, which is new or empty; its name is the project's."),
    ],
    template: Annotated[
        str, typer.Option("--template", "-t", metavar="NAME", help=f"Template: {', '.join(TEMPLATES)}.")
    ] = "numpy",
    as_json: options.JsonOption = False,
) -> None:
    """Create a small project: a model, a client, a job to simulate and to submit, and tests."""
    with session.reporting(context, as_json) as out:
        name = folder.resolve().name
        if mistake := _find_mistake(folder, name, template):
            out.error(mistake)
            raise typer.Exit(session.WRONG_USAGE)
        try:
            files = create(folder, name, template)
        except OSError as exc:
            out.error(f"{folder} cannot be written: {exc.strerror or exc}; choose another folder")
            raise typer.Exit(session.WRONG_USAGE) from exc
        _print(out, folder, files)


def create(folder: Path, name: str, template: str) -> list[str]:
    """Write the files of a template to a folder, and return their names. Raises `OSError`."""
    extras, client_extras = TEMPLATES[template]
    values = {"PROJECT_NAME": name, "FEDPLAT_EXTRAS": extras, "CLIENT_EXTRAS": client_extras}
    folder.mkdir(parents=True, exist_ok=True)
    root = importlib.resources.files("fedplat.cli") / "templates"
    written: list[str] = []
    own = {file.name: file for file in (*_files(root / _COMMON), *_files(root / template))}  # the last of a name
    for file in own.values():
        text = file.read_text("utf-8")
        for key, value in values.items():
            text = text.replace(key, value)
        written.append(_RENAMED.get(file.name, file.name))
        (folder / written[-1]).write_text(text, "utf-8")
    (folder / schema.FILE_NAME).write_text(schema.format_schema(), "utf-8")
    return sorted([*written, schema.FILE_NAME])


def _find_mistake(folder: Path, name: str, template: str) -> str:
    if template not in TEMPLATES:
        expected = f"expected one of {', '.join(TEMPLATES)}{suggest(template, TEMPLATES)}"
        return f"there is no template {template!r}; {expected}"
    if not re.fullmatch(NAME_PATTERN, name):
        return (
            f"{name!r} cannot be the name of a project: expected at most 63 letters, digits, '_', '.' and '-', and a "
            "letter or a digit first; choose another folder"
        )
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file; expected a folder that does not exist or is empty"
    if folder.is_dir() and next(folder.iterdir(), None) is not None:
        return f"{folder} is not empty; expected a folder that does not exist or is empty"
    return ""


def _files(folder: Traversable) -> list[Traversable]:
    return [file for file in folder.iterdir() if file.is_file()]  # pip adds a folder with bytecode


def _print(out: output.Output, folder: Path, files: list[str]) -> None:
    if out.as_json:
        out.json({"folder": str(folder), "files": files})
        return
    out.line(f"created {folder}: {', '.join(files)}")
    out.line("next:")
    if folder.resolve() != Path.cwd():
        out.line(f"  cd {shlex.quote(str(folder))}")
    out.line("  fedplat simulate job.toml")
    has_pytest = importlib.util.find_spec("pytest") is not None
    out.line("  python -m pytest" if has_pytest else "  python -m pip install pytest && python -m pytest")
    out.line("README.md has the commands for a server and real clients.")
