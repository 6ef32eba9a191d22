"""A Flower app: the folder with its `pyproject.toml`, and the objects that it names."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from fedplat.config import loaded_plugins, toml, user_code
from fedplat.config.toml import format_value, suggest
from fedplat.errors import FlowerError, MissingExtraError, UserCodeError
from fedplat.extras import install_command

Config: TypeAlias = dict[str, bool | int | float | str]
OLDEST, BEFORE = (1, 41), (1, 43)
"""The versions of `flwr` that are tested: from the first to before the second."""
DEFAULT_NUM_CLIENTS = 10
_COMPONENTS: Mapping[Literal["clientapp", "serverapp"], str] = {"clientapp": "ClientApp", "serverapp": "ServerApp"}


class FlowerApp(msgspec.Struct, frozen=True):
    """A Flower app: what its `pyproject.toml` says.

    `clientapp` and `serverapp` are references such as `quickstart.client_app:app`. `run_config` has the keys of
    `[tool.flwr.app.config]`, those of inner tables joined by dots. `num_clients` is the number of SuperNodes that the
    app's default federation simulates.
    """

    folder: Path
    name: str
    clientapp: str
    serverapp: str
    run_config: Config
    num_clients: int = DEFAULT_NUM_CLIENTS
    version: str = ""

    def load_client_app(self) -> Any:
        """Import the ClientApp. Raises `FlowerError` if it cannot be imported or is no ClientApp."""
        return self._load("clientapp")

    def load_server_app(self) -> Any:
        """Import the ServerApp. Raises `FlowerError` if it cannot be imported or is no ServerApp."""
        return self._load("serverapp")

    def with_run_config(self, changes: Sequence[str]) -> FlowerApp:
        """Return the app with changes of its run config, which are texts such as `lr=0.1`.

        Raises `FlowerError` for a key that the app does not have, since `flwr run` refuses it as well.
        """
        config = dict(self.run_config)
        for key, value in read_settings(changes).items():
            if key not in config:
                hint = suggest(key, config)
                raise FlowerError(f"{self.name} has no key {format_value(key)} in [tool.flwr.app.config]{hint}")
            if not _fits(value, config[key]):
                expected = type(config[key]).__name__
                raise FlowerError(
                    f"{self.name} has {key} = {format_value(config[key])}, of the type {expected}; "
                    f"{format_value(value)} is a {type(value).__name__}"
                )
            config[key] = value
        return msgspec.structs.replace(self, run_config=config)

    def _load(self, component: Literal["clientapp", "serverapp"]) -> Any:
        check_version()
        import flwr.clientapp
        import flwr.serverapp

        kind = flwr.clientapp.ClientApp if component == "clientapp" else flwr.serverapp.ServerApp
        reference = getattr(self, component)
        try:
            found = user_code.load(reference, self.folder)
        except UserCodeError as exc:
            raise FlowerError(f"{component} = {format_value(reference)} of {self.name}: {exc}") from exc
        if not isinstance(found, kind):
            raise FlowerError(
                f"{component} = {format_value(reference)} of {self.name} is a {type(found).__name__}; expected a "
                f"{_COMPONENTS[component]}"
            )
        return found


def read_app(folder: Path) -> FlowerApp:
    """Read the `pyproject.toml` of a Flower app, without importing the app. Raises `FlowerError`."""
    file = folder / "pyproject.toml"
    try:
        project = toml.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise FlowerError(f"{file} cannot be read: {reason}; expected the folder of a Flower app") from exc
    except tomllib.TOMLDecodeError as exc:
        raise FlowerError(f"{file} is not TOML: {exc}") from exc
    flwr = _table(project, file, "tool", "flwr")
    components = _table(flwr, file, "app", "components")
    for component in _COMPONENTS:
        if not isinstance(components.get(component), str):
            raise FlowerError(
                f'{file} has no text {component} in [tool.flwr.app.components]; expected such as "package.module:app"'
            )
    return FlowerApp(
        folder=folder.resolve(),
        name=str(_table(project, file, "project").get("name", folder.resolve().name)),
        clientapp=components["clientapp"],
        serverapp=components["serverapp"],
        run_config=_flatten(_table(flwr, file, "app", "config"), file),
        num_clients=_read_num_clients(_table(flwr, file, "federations")),
        version=str(_table(project, file, "project").get("version", "")),
    )


def describe_app(name: str, app: FlowerApp) -> loaded_plugins.PluginVersion:
    """Return the identity of an app on a server: its version, and a digest of its Python and TOML files."""
    digest = sha256()
    for file in sorted((*app.folder.rglob("*.py"), *app.folder.rglob("*.toml"))):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(app.folder)} {len(content)}\n".encode() + content)
    return loaded_plugins.PluginVersion(loaded_plugins.FLOWER_APPS, name, app.version, digest.hexdigest())


def read_settings(texts: Sequence[str]) -> Config:
    """Return settings from texts such as `lr=0.1`: TOML values, or plain text. Raises `FlowerError`."""
    settings: Config = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise FlowerError(f"{format_value(text)}: expected KEY=VALUE, such as lr=0.1")
        try:
            read: Any = toml.loads(f"value = {value.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            read = value.strip()
        if not isinstance(read, bool | int | float | str):
            raise FlowerError(f"{format_value(text)}: expected true, false, a number or a text as the value")
        settings[key.strip()] = read
    return settings


def check_version() -> None:
    """Raise `FlowerError` unless a tested version of `flwr` is installed; `MissingExtraError` without any version."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError as exc:
        raise MissingExtraError(f"Flower apps need flwr: {install_command('flower')}") from exc
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not OLDEST <= numbers < BEFORE:
        raise FlowerError(
            f"flwr {version} is installed; expected at least {'.'.join(map(str, OLDEST))} and below "
            f"{'.'.join(map(str, BEFORE))}: {install_command('flower')}"
        )


def _table(table: Mapping[str, Any], file: Path, *names: str) -> dict[str, Any]:
    """Return an inner table, or an empty one. Raises `FlowerError` if it is no table."""
    for name in names:
        inner = table.get(name, {})
        if not isinstance(inner, dict):
            raise FlowerError(f"{name} in {file} is a {type(inner).__name__}; expected a table")
        table = cast(dict[str, Any], inner)
    return dict(table)


def _flatten(table: Mapping[str, Any], file: Path, prefix: str = "") -> Config:
    """Return the values of a table and its inner tables; the keys of inner tables are joined by dots."""
    found: Config = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flatten(cast(dict[str, Any], value), file, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{key}"] = value
        else:
            raise FlowerError(
                f"{prefix}{key} in [tool.flwr.app.config] of {file} is a {type(value).__name__}; expected true, false, "
                "a number or a text"
            )
    return found


def _fits(value: object, default: object) -> bool:
    """Return whether a value has the type of the app's own; an integer may replace a float."""
    return type(value) is type(default) or (type(value) is int and isinstance(default, float))


def _read_num_clients(federations: Mapping[str, Any]) -> int:
    """Return the number of simulated SuperNodes of the default federation, or of the only one."""
    chosen = federations.get(str(federations.get("default", "")))
    tables = [chosen] if isinstance(chosen, dict) else [each for each in federations.values() if isinstance(each, dict)]
    for table in cast(list[dict[str, Any]], tables):
        options = table.get("options")
        number = options.get("num-supernodes") if isinstance(options, dict) else None
        if type(number) is int and number > 0:
            return number
    return DEFAULT_NUM_CLIENTS
