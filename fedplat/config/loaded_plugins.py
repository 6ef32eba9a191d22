"""The plugins of a server or a client: named by its owner at the start, imported once, and identified by a digest.

A plugin is named by a text `KIND.NAME=REFERENCE`, such as `rules.lion=/opt/lion.py:Lion`. Without a reference it is the
entry point NAME of an installed package in the group `fedplat.KIND`. In Python its class may take the place of the
reference. A job selects plugins by name only.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from fedplat.config import decoding, user_code
from fedplat.config.plugins import (
    BUILTIN,
    ENTRY_POINTS,
    Kind,
    Plugins,
    find_entry_points,
    find_file,
    find_records,
    kinds,
)
from fedplat.errors import FedplatError, PluginError
from fedplat.texts import NAME_PATTERN

JOB_KINDS = (
    "rules",
    "robust-rules",
    "pre-aggregators",
    "policies",
    "codecs",
    "staleness",
    "algorithms",
    "flower-strategies",
    "procedures",
)
"""The kinds that jobs of a server may use."""
CLIENT_KINDS = ("codecs", "algorithms", "procedures")
"""The kinds whose code runs on clients."""
FLOWER_APPS = "flower-apps"
"""The kind of Flower apps, which jobs name in the table `[flower]`; they are folders, not classes."""
_DIGITS = 12
_EXPECTED = "expected KIND.NAME=/path/to/file.py:NAME, KIND.NAME=module:NAME, or KIND.NAME of an installed package"
Request = TypeVar("Request", bound=Struct)
ShortText = Annotated[str, Meta(max_length=200)]


class PluginVersion(Struct, frozen=True):
    """The identity of a plugin's code.

    `version` is that of its installed package, "" without one. `digest` is the SHA-256 of the file that defines it, in
    hexadecimal; "" if it is not in a file.
    """

    kind: ShortText
    name: ShortText
    version: ShortText = ""
    digest: ShortText = ""

    @property
    def label(self) -> str:
        """The plugin's kind and name, as in the option that names it."""
        return f"{self.kind}.{self.name}"

    @property
    def short(self) -> str:
        """The version, if there is one, and the beginning of the digest."""
        return " ".join([*filter(None, [self.version]), f"sha256 {self.digest[:_DIGITS] or 'unknown'}"])


class PluginReference(Struct, frozen=True):
    """A plugin that another process of this machine or its workers can import: `reference`, relative to `folder`."""

    version: PluginVersion
    reference: str
    folder: str


@dataclasses.dataclass(frozen=True)
class LoadedPlugins:
    """The imported plugins of a process: by kind and name in `table`, with their versions, in order, and references."""

    table: Plugins = BUILTIN
    versions: tuple[PluginVersion, ...] = ()
    references: tuple[PluginReference, ...] = ()

    def names(self, kind: str) -> list[str]:
        """Return the names of the plugins of a kind."""
        return sorted(version.name for version in self.versions if version.kind == kind)

    def select(self, wanted: Iterable[PluginVersion]) -> tuple[PluginVersion, ...]:
        """Return the versions that this process has of plugins; those that it does not have are left out."""
        labels = {each.label for each in wanted}
        return tuple(version for version in self.versions if version.label in labels)

    def find_used(self, options: Struct, config: Mapping[str, object] | None = None) -> tuple[PluginVersion, ...]:
        """Return the plugins whose records are among the fields of options, and those that they or `config` name."""
        types, algorithm = {type(record) for record in find_records(options)}, (config or {}).get("algorithm")
        app = getattr(getattr(options, "flower", None), "app", None)

        def is_used(version: PluginVersion) -> bool:
            if version.kind == FLOWER_APPS:
                return version.name == app
            if version.kind == "algorithms" and version.name == algorithm:
                return True
            return self.table.find(kinds()[version.kind], version.name) in types

        return tuple(version for version in self.versions if is_used(version))


NO_PLUGINS = LoadedPlugins()
"""The built-in names only."""


def parse_plugins(texts: Iterable[str]) -> dict[str, str]:
    """Return the references of texts `KIND.NAME=REFERENCE` by `KIND.NAME`; "" for entry points.

    Raises `PluginError`.
    """
    found: dict[str, str] = {}
    for text in texts:
        label, sign, reference = text.partition("=")
        if sign and not reference:
            raise PluginError(f"{text}: the reference is missing; {_EXPECTED}")
        if label in found:
            raise PluginError(f"{text}: {label} is {found[label] or 'an entry point'} already")
        found[label] = reference
    return found


def load_plugins(
    named: Mapping[str, object], allowed: Collection[str] = JOB_KINDS, folder: Path | None = None
) -> LoadedPlugins:
    """Import plugins; `named` maps `KIND.NAME` to a reference, "" (an entry point) or a class.

    References are relative to `folder`, by default the current one. Raises `PluginError`, which names the
    plugin, if one cannot be used, and for a kind that is not `allowed`.
    """
    given: dict[tuple[str, str], type[Struct]] = {}
    versions: list[PluginVersion] = []
    references: list[PluginReference] = []
    for label, source in named.items():
        kind, name = _parse_label(label, allowed)
        try:
            with user_code.wrap_errors(label):
                record, version, reference = _load(kind, name, source, folder or Path.cwd())
        except FedplatError as exc:
            text = str(exc)
            raise PluginError(text if text.startswith(label) else f"{label}: {text}") from exc
        given[kind.name, name] = record
        versions.append(version)
        if reference is not None:
            references.append(reference)
    versions.sort(key=lambda version: version.label)
    return LoadedPlugins(Plugins(given), tuple(versions), tuple(references))


def load_references(references: Iterable[PluginReference]) -> LoadedPlugins:
    """Import plugins that another process has loaded. Raises `PluginError` if a file has changed since."""
    given: dict[tuple[str, str], type[Struct]] = {}
    wanted = tuple(references)
    for each in wanted:
        version = each.version
        record = _import(each.reference, Path(each.folder))
        if _digest(record) != version.digest:
            raise PluginError(
                f"the file of the plugin {version.label} has changed since the server imported it; restart the server"
            )
        given[version.kind, version.name] = kinds()[version.kind].check(record, version.name)
    return LoadedPlugins(Plugins(given), tuple(each.version for each in wanted), wanted)


def select_references(
    references: Iterable[PluginReference], versions: Iterable[PluginVersion]
) -> tuple[PluginReference, ...]:
    """Return the references of plugins by kind and name."""
    labels = {version.label for version in versions}
    return tuple(each for each in references if each.version.label in labels)


def decode_with_plugins(content: bytes, record: type[Request]) -> Request:
    """Decode a request of another process as msgpack, with the plugins of its field `plugins`, which are imported.

    Raises `PluginError` or `UserCodeError` if one of them cannot be used.
    """
    plugins = load_references(msgspec.msgpack.decode(content, type=decoding.prepare_type(_WithPlugins)).plugins)
    return msgspec.msgpack.decode(content, type=decoding.prepare_type(record), dec_hook=plugins.table.decode)


class _WithPlugins(Struct, frozen=True):
    plugins: tuple[PluginReference, ...] = ()


def _parse_label(label: str, allowed: Collection[str]) -> tuple[Kind, str]:
    group, dot, name = label.partition(".")
    known = {each: kinds()[each] for each in allowed if each in kinds()}
    if not dot or not re.fullmatch(NAME_PATTERN, name):
        raise PluginError(f"{label}: {_EXPECTED}; a NAME has at most 63 letters, digits, '_', '.' and '-'")
    if group not in known:
        raise PluginError(f"{label}: the kind is {group!r}; expected one of {', '.join(known)}")
    if name in known[group].builtin:
        raise PluginError(f"{label}: {name} is a built-in name, which a plugin cannot replace; expected another name")
    return known[group], name


def _load(
    kind: Kind, name: str, source: object, folder: Path
) -> tuple[type[Struct], PluginVersion, PluginReference | None]:
    """Return the class of a plugin, its version, and its reference unless it is a given object."""
    reference, package = source, ""
    if source == "":
        reference, package = _find_entry_point(kind, name)
    loaded = _import(reference, folder) if isinstance(reference, str) else reference
    record = kind.check(loaded, name)
    if not package and isinstance(reference, str) and not user_code.split(reference)[0].endswith(".py"):
        packages = importlib.metadata.packages_distributions().get(record.__module__.partition(".")[0], [])
        package = importlib.metadata.version(packages[0]) if packages else ""
    version = PluginVersion(kind.name, name, package, _digest(record))
    if not isinstance(reference, str):
        return record, version, None
    return record, version, PluginReference(version, _absolute(reference, folder), str(folder))


def _import(reference: str, folder: Path) -> object:
    with user_code.importable(reference, folder):
        return user_code.load(reference, folder)


def _absolute(reference: str, folder: Path) -> str:
    module_name, name = user_code.split(reference)
    return f"{(folder / module_name).resolve()}:{name}" if module_name.endswith(".py") else reference


def _find_entry_point(kind: Kind, name: str) -> tuple[str, str]:
    """Return the reference and the package's version of an entry point."""
    point = find_entry_points(kind.name).get(name)
    if point is None:
        raise PluginError(
            f"no installed package has an entry point {name!r} in the group {ENTRY_POINTS}{kind.name}; install it, or "
            f"expected {kind.name}.{name}=/path/to/file.py:NAME"
        )
    return f"{point.module}:{point.attr}", point.dist.version if point.dist is not None else ""


def _digest(record: object) -> str:
    file = find_file(record) if inspect.isclass(record) else None
    return "" if file is None else sha256(file.read_bytes()).hexdigest()


def describe_versions(versions: Iterable[PluginVersion]) -> str:
    """Return versions as text for people."""
    return " and ".join(f"{version.label} {version.short}" for version in versions)


def versions_to_builtins(versions: Iterable[PluginVersion]) -> list[dict[str, str]]:
    """Return versions as plain values, for JSON."""
    return [msgspec.structs.asdict(version) for version in versions]
