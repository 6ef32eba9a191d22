"""Options that may also be given by variables of the environment and by the TOML file of `--config`.

An option on the command line goes before its variable, and that before the file. The variable of `--log-level` is
`FEDPLAT_LOG_LEVEL`, its key in the file `log-level`. Options that are repeatable are lists in the file, and words in
the variable, quoted as in a shell.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from fedplat.config import toml

if TYPE_CHECKING:
    import click

    _Command = click.Command
else:
    _Command = object

PREFIX = "FEDPLAT_"
CONFIG = "config"
"""The option that names the file."""
CONFIG_HELP = (
    "TOML file with options by their long names, such as log-level = 'debug'. An option and its variable go before it."
)
MAX_BYTES = 2**20
OF_ONE_CALL = frozenset({"yes", "dry-run"})
"""Options that are given with a call only: a variable that stays set would agree to the next one as well."""
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_ENVIRONMENT, _FILE = "ENVIRONMENT", "DEFAULT_MAP"


class ConfiguredCommand(_Command):
    """A command whose options have variables and, if it has the option `--config`, values in that file.

    The callback of that option calls `use_file`.
    """

    error_class: ClassVar[type[click.BadParameter]]
    """The error of the command's library for a wrong value of an option."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        for option in list_options(self):
            names = list_variables(option)
            option.envvar, option.show_envvar = names[0] if len(names) == 1 else names, True
            if option.multiple:
                setattr(option, "value_from_envvar", functools.partial(self._read_words, option))  # noqa: B010

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except self.error_class as exc:
            if origin := _find_origin(ctx, exc.param):
                message = f"{exc.message.rstrip('.')} (from {origin})"
                raise self.error_class(message, exc.ctx, exc.param, exc.param_hint) from exc
            raise

    def _read_words(self, option: click.Option, ctx: click.Context) -> list[str] | None:
        text = option.resolve_envvar_value(ctx)
        try:
            return None if text is None else shlex.split(text)
        except ValueError as exc:
            raise self.error_class(f"{exc}; expected words, quoted as in a shell", ctx, option) from exc


def use_file(context: click.Context, path: Path | None) -> None:
    """Take values of options from a file, below the command line and the variables. Raises `ValueError`.

    Options of other commands of the program are left out, so that they can share a file.
    """
    if path is not None and not context.resilient_parsing:
        others = getattr(context.parent and context.parent.command, "commands", {}).values()
        known = [*list_options(context.command), *(each for other in others for each in list_options(other))]
        try:
            context.default_map = read_file(path, known)
        except ValueError as exc:
            raise ValueError(f"{path}: {exc}") from exc
        context.meta[__name__] = str(path)


def list_options(command: click.Command) -> list[click.Option]:
    """Return the options of a command that may be variables or keys of a file."""
    options: list[Any] = [each for each in command.params if each.param_type_name == "option"]
    return [each for each in options if not each.hidden and name_of(each) not in OF_ONE_CALL]


def name_of(option: click.Option) -> str:
    """Return the key of an option in the file: its long name."""
    return max(option.opts, key=len).removeprefix("--")


def list_variables(option: click.Option) -> Sequence[str]:
    """Return the variables of an option, the first one that is set counts: those that it names, or that of its name."""
    named = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    if any(each.startswith(PREFIX) for each in named):
        return named
    return [PREFIX + name_of(option).replace("-", "_").upper(), *named]


def rank(context: click.Context, parameter: str) -> int:
    """Return where a value comes from: 0 the command line, 1 a variable, 2 the file, 3 nowhere."""
    source = context.get_parameter_source(parameter)
    places = ("COMMANDLINE", _ENVIRONMENT, _FILE)
    return places.index(source.name) if source is not None and source.name in places else len(places)


def _find_origin(ctx: click.Context, option: click.Parameter | None) -> str:
    """Return the variable or the file that has a wrong value; "" for the command line."""
    source = ctx.get_parameter_source(option.name) if option is not None and option.name else None
    if source is None or option is None:
        return ""
    if source.name == _FILE:
        return str(ctx.meta.get(__name__, ""))
    names = list_variables(option) if source.name == _ENVIRONMENT else []  # pyright: ignore[reportArgumentType]
    return next((name for name in names if os.environ.get(name)), "")


def read_file(path: Path, options: Sequence[click.Option]) -> dict[str, Any]:
    """Return the values of a file by the names of the parameters. Raises `ValueError` with a sentence.

    Of options with one name the first one counts.
    """
    by_name = {name_of(each): each for each in reversed(options) if name_of(each) != CONFIG}
    text, mode = _read_text(path)
    try:
        values = toml.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ValueError(f"it is not TOML: {exc}") from exc
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in by_name:
            raise ValueError(f"unknown key {toml.shown_key(key)}{_suggest(key, by_name)}")
        option = by_name[key]
        found[str(option.name)] = _check(key, value, option)
        if mode & stat.S_IROTH and _is_secret(key, value):
            raise ValueError(f"it has a secret ({key}), and all users of this host can read it; chmod 600 {path}")
    return found


def _suggest(key: str, known: Mapping[str, object]) -> str:
    return toml.suggest(key.replace("_", "-"), known) or "; expected the long name of an option, such as log-level"


def _read_text(path: Path) -> tuple[str, int]:
    """Return the text and the mode of a file that no other user may write, since it names code and addresses."""
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            content = opened.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ValueError(f"it cannot be read: {exc.strerror}") from exc
    if status.st_mode & stat.S_IWOTH or status.st_uid not in (0, _own_id(status)):
        raise ValueError(
            "another user can write it, and it may name code that runs here; expected a file of your own: chown it, "
            f"and chmod o-w {path}"
        )
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB; expected a few options")
    try:
        return content.decode("utf-8"), status.st_mode
    except UnicodeDecodeError as exc:
        raise ValueError("it is not UTF-8") from exc


def _own_id(status: os.stat_result) -> int:
    return os.geteuid() if hasattr(os, "geteuid") else status.st_uid  # Windows has no such numbers


def _is_secret(key: str, value: object) -> bool:
    return key == "ticket" or any(_PASSWORD.search(each) for each in _words(value))


def _words(value: object) -> list[str]:
    found: list[Any] = list(value) if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownArgumentType]
    return [each for each in found if isinstance(each, str)]


def _check(key: str, value: object, option: click.Option) -> Any:
    """Return a value that is of the option's type. Raises `ValueError`."""
    expected = _kind(option)
    given = list(value) if isinstance(value, list) and option.multiple else [value]  # pyright: ignore
    for each in given:
        if type(each) not in expected or (option.multiple and not isinstance(value, list)):
            names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
            text = names[expected[-1]]
            what = f"a list of texts, such as {key} = ['...']" if option.multiple else text
            raise ValueError(f"{key} = {toml.format_value(value)}: expected {what}")
    return given if option.multiple else value


def _kind(option: click.Option) -> tuple[type, ...]:
    """Return the types of TOML that an option takes; the last one names them in messages."""
    if option.is_flag:
        return (bool,)
    descriptor = getattr(option, "type_descriptor", None)  # of typer since 0.26
    name = option.type.name if descriptor is None else getattr(descriptor.annotation, "__name__", "")
    if name.startswith("int"):
        return (int,)
    if name.startswith("float"):
        return (int, float)
    return (int, float, str) if option.metavar in ("DURATION", "SIZE") else (str,)
