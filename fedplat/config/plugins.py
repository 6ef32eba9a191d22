"""Plugins: options records that are not part of fedplat, named in a file like the built-in ones.

A `Kind` is a table of names, such as that of the aggregation rules. `Plugins` defines which further names a file may
use, in three ways: names that its owner defines; names of installed packages, which declare entry points in the group
`fedplat.KIND`; and references such as `my_rule.py:MyRule`, relative to a folder. The code of a plugin is imported only
if a file names it. `BUILTIN`, the default of all functions that read files, finds only the built-in names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from fedplat import texts
from fedplat.config import decoding, user_code
from fedplat.errors import FedplatError, PluginError

ENTRY_POINTS = "fedplat."
"""Prefix of the groups of entry points; the rest is the name of a kind."""
_KINDS: dict[str, Kind] = {}
Built = TypeVar("Built")
Contract = TypeVar("Contract")
Options = TypeVar("Options")
Record = TypeVar("Record", bound=Struct)


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A table of options records, each selected by its name.

    `name` identifies the kind in entry points and in options of commands. `key` is the key of a table in a file whose
    value selects the record. `contract` is the protocol of the records, which is also the type of a field that holds
    one. `methods` are the functions that the protocol requires; `base` has its other attributes, which a plugin need
    not define. `builtin` are the records of fedplat, tagged with their names. With `plain`, text stands for a table
    that has only the key: `engine = "loop"` for `engine = { name = "loop" }`.
    """

    name: str
    key: str
    noun: str
    contract: type
    methods: tuple[str, ...]
    builtin: Mapping[str, type]
    base: type[Struct] = Struct
    plain: bool = False
    default: str = ""
    """The name that is assumed for a table without the key; "": the key is required."""
    adapt: Callable[[object], object] | None = None
    """Returns the options record of a class of another library, and anything else as it is; None: a class must
    itself be a record."""

    def check(self, record: object, name: str) -> type[Struct]:
        """Return an options record of this kind. Raises `PluginError` if it is not one."""
        origin = f"{self.name}.{name}"
        record = record if self.adapt is None else self.adapt(record)
        if not isinstance(record, type):
            raise PluginError(
                f"{origin} is of type {type(record).__name__}; expected a class, the options of {self.noun}"
            )
        if not issubclass(record, Struct) or not record.__struct_config__.frozen:
            raise PluginError(
                f"{origin}: {record.__name__} is not a frozen record; expected "
                f"class {record.__name__}(msgspec.Struct, frozen=True)"
            )
        missing = [method for method in self.methods if not callable(getattr(record, method, None))]
        if missing:
            expected = ", ".join(f"{method}()" for method in self.methods)
            raise PluginError(f"{origin}: {record.__name__} has no {missing[0]}(); {self.noun} has {expected}")
        if self.key in record.__struct_fields__:
            raise PluginError(f"{origin}: {record.__name__} has a field {self.key}, the key that selects the record")
        return record


def define(kind: Kind) -> Kind:
    """Add a kind to those that fields of records may hold, and return it."""
    _KINDS[kind.name] = kind
    return kind


def add_builtin(kind: str, *records: type) -> None:
    """Add records of fedplat to a kind that a package in a layer below has defined."""
    old = _KINDS[kind]
    define(dataclasses.replace(old, builtin={**old.builtin, **by_name(*records)}))


def by_name(*records: type[Options]) -> dict[str, type[Options]]:
    """Return built-in records by their names, which are their tags."""
    return {str(cast(type[Struct], record).__struct_config__.tag): record for record in records}


def find_kind(annotation: object) -> Kind | None:
    """Return the kind whose records a field of this type holds; None for any other type."""
    return next((kind for kind in _KINDS.values() if annotation is kind.contract), None)


def kinds() -> dict[str, Kind]:
    """Return all kinds that have been defined, by name."""
    return dict(_KINDS)


def name_of(options: object) -> str:
    """Return the name of an options record in a file; that of its class if it was never named in one."""
    record = cast(type[Struct], type(options))
    return str(record.__struct_config__.tag or record.__name__)


class Buildable(Protocol):
    """An options record that builds an object."""

    @property
    def build(self) -> Callable[..., object]:
        """The function that returns the object with these options."""
        ...


def build_checked(options: Buildable, expected: type[Built], key: str, *arguments: object) -> Built:
    """Return what options build. Raises `PluginError` or `UserCodeError` if that fails, or has another type.

    `key` is the key of the file that selects the options.
    """
    with user_code.wrap_errors(f'{key} = "{name_of(options)}": build()'):
        built = options.build(*arguments)
    if not isinstance(built, expected):
        name = expected.__name__
        raise PluginError(
            f'{key} = "{name_of(options)}": build() returned a {type(built).__name__}; expected '
            f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
        )
    return built


def is_builtin(options: object, contract: type) -> bool:
    """Return whether an options record is one of fedplat, whose results need no checks."""
    kind = find_kind(contract)
    return kind is not None and type(options) in kind.builtin.values()


def find_records(value: object) -> Iterator[Struct]:
    """Yield a record, or those of a sequence, and all records among their fields."""
    if isinstance(value, Struct):
        yield value
        value = msgspec.structs.astuple(value)
    for item in cast(Sequence[object], value) if isinstance(value, tuple | list) else ():
        yield from find_records(item)


def find_file(record: type) -> Path | None:
    """Return the file that defines a class; None for a class without one."""
    file = getattr(sys.modules.get(record.__module__), "__file__", None)
    return None if file is None else Path(file)


def digests(value: object) -> dict[str, str]:
    """Return the SHA-256 of the file of each plugin among the fields of a record, by the plugin's name.

    For a class that is defined in a notebook, it is that of the source text of its functions.
    """
    found: dict[str, str] = {}
    for record in find_records(value):
        if not type(record).__module__.startswith("fedplat."):
            found[name_of(record)] = sha256(_read_source(type(record))).hexdigest()
    return found


def _read_source(record: type[Struct]) -> bytes:
    file = find_file(record)
    if file is not None:
        return file.read_bytes()
    functions = [
        each
        for base in record.__mro__
        if base.__module__ == record.__module__
        for each in vars(base).values()
        if inspect.isfunction(each) and each.__module__ == record.__module__
    ]
    try:
        return "\n".join(map(inspect.getsource, functions)).encode()
    except OSError:  # typed into an interpreter that keeps no text
        return b"".join(each.__code__.co_code for each in functions)


class AbsentPlugin(Struct, frozen=True):
    """The options of a plugin whose code this process does not have. All its functions raise `PluginError`.

    It makes stored jobs readable, but they cannot run with it.
    """


def adopt(options: Contract, contract: type[Contract], name: str = "") -> Contract:
    """Return options as if a file had named their class: with all attributes of the kind. Raises `PluginError`.

    `name` is the name in the file, by default that of the class.
    """
    kind = find_kind(contract)
    assert kind is not None
    if type(options) in kind.builtin.values():
        return options
    record = kind.check(type(options), type(options).__name__)
    if record.__struct_config__.tag_field == kind.key:
        return options
    values = {field: getattr(options, field) for field in record.__struct_fields__}
    return cast(Contract, _with_name(record, kind, name or record.__name__)(**values))


def has_absent(options: Struct) -> bool:
    """Return whether a record, or one among its fields, stands for a plugin that this process does not have."""
    return any(isinstance(record, AbsentPlugin) for record in find_records(options))


@dataclasses.dataclass(frozen=True)
class Plugins:
    """The names that a file may use besides the built-in ones.

    `given` are records by kind and name. With `installed`, the entry points of installed packages are names, too. With
    `folder`, a name may be a reference, `module:object` or `path/to/file.py:object`, relative to that folder. `absent`
    are kinds and names of plugins whose code this process does not have (`AbsentPlugin`).
    """

    given: Mapping[tuple[str, str], type[Struct]] = dataclasses.field(
        default_factory=dict[tuple[str, str], type[Struct]]
    )
    installed: bool = False
    folder: Path | None = None
    absent: frozenset[tuple[str, str]] = frozenset()

    def names(self, kind: Kind) -> list[str]:
        """Return all names of a kind, without importing any plugin."""
        given = [name for group, name in (*self.given, *sorted(self.absent)) if group == kind.name]
        return [*kind.builtin, *given, *(find_entry_points(kind.name) if self.installed else ())]

    def find(self, kind: Kind, name: str) -> type[Struct] | None:
        """Return the options record with a name, or None. Raises `PluginError` if a plugin cannot be used."""
        if name in kind.builtin:
            return kind.builtin[name]
        if (kind.name, name) in self.given:
            record: object = self.given[kind.name, name]
        elif self.installed and name in (found := find_entry_points(kind.name)):
            with user_code.wrap_errors(f"the plugin {kind.name}.{name}"):
                record = found[name].load()
        elif self.folder is not None and ":" in name:
            record = user_code.load(name, self.folder)
        else:
            return _make_absent(kind, name) if (kind.name, name) in self.absent else None
        folder = self.folder if ":" in name and (kind.name, name) not in self.given else None
        return _with_name(kind.check(record, name), kind, name, folder)

    def decode(self, annotation: type, value: Any) -> Any:
        """Convert a table to a record of a kind: the `dec_hook` of msgspec. Raises `ValueError` for an unknown name."""
        kind = find_kind(annotation)
        if kind is None:
            return value  # a type of a plugin's own; msgspec checks it
        if kind.plain and isinstance(value, str):
            value = {kind.key: value}
        if not isinstance(value, Mapping):
            return value
        name = cast(Mapping[str, object], value).get(kind.key, kind.default)
        record = self.find(kind, name) if isinstance(name, str) else None
        if record is None:
            raise ValueError(f"{kind.key} = {name!r}: {kind.noun} of this name is not known")
        return self.convert(value, record)

    def convert(self, table: object, record: type[Record]) -> Record:
        """Convert a valid table to a record. Raises `msgspec.ValidationError`, also for errors in a record's check."""
        try:
            return msgspec.convert(table, decoding.prepare_type(record), dec_hook=self.decode)
        except (msgspec.ValidationError, FedplatError):
            raise
        except Exception as exc:  # a plugin's __post_init__ may raise anything
            config = record.__struct_config__
            if config.tag is None:
                raise PluginError(f"a plugin's check raised {texts.describe(exc)}") from exc
            text = f'{config.tag_field} = "{config.tag}": its check raised {texts.describe(exc)}'
            raise msgspec.ValidationError(text) from exc


BUILTIN = Plugins()
"""The built-in names only."""


def find_entry_points(kind: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages for a kind, by name; of equal names the first one on the path."""
    return _scan_entry_points(tuple((folder, _changed_ns(folder)) for folder in sys.path)).get(kind, {})


def _changed_ns(folder: str) -> int:
    """Return a number that changes when a package is installed in a folder or removed from it."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _scan_entry_points(_: tuple[tuple[str, int], ...]) -> Mapping[str, Mapping[str, importlib.metadata.EntryPoint]]:
    """Return all entry points of plugins by kind. The scan reads a file of each installed package, which is slow."""
    found, of_all = dict[str, dict[str, importlib.metadata.EntryPoint]](), importlib.metadata.entry_points()
    for group in of_all.groups:
        kind = group.removeprefix(ENTRY_POINTS)
        if kind != group:
            found[kind] = {point.name: point for point in reversed(tuple(of_all.select(group=group)))}
    return found


@functools.cache
def _with_name(record: type[Struct], kind: Kind, name: str, folder: Path | None = None) -> type[Struct]:
    """Return a subclass with a name, which is decoded, encoded and reported in errors like a built-in record.

    `folder` is the folder to which the name, a reference, is relative.
    """
    if (record.__struct_config__.tag_field, record.__struct_config__.tag) == (kind.key, name):
        return record
    inherited = [field for field in msgspec.structs.fields(kind.base) if field.name not in record.__struct_fields__]
    has_base = issubclass(record, kind.base) or bool(inherited)  # two bases with fields cannot be combined
    return msgspec.defstruct(
        record.__name__,
        [(field.name, field.type, field.default) for field in inherited],
        bases=(record,) if has_base else (record, kind.base),
        module=record.__module__,
        namespace={"__doc__": record.__doc__, "__reduce__": _reduce(record, kind, name, folder)},
        tag_field=kind.key,
        tag=name,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )


@functools.cache
def _make_absent(kind: Kind, name: str) -> type[Struct]:
    """Return the record that stands for a plugin, and accepts any options."""

    def fail(*_: object) -> object:
        raise PluginError(f"the plugin {kind.name}.{name} is not available in this process")

    bases = (AbsentPlugin,) if kind.base is Struct else (AbsentPlugin, kind.base)
    methods = dict.fromkeys(kind.methods, fail)
    return msgspec.defstruct(
        "Absent", [], bases=bases, namespace=methods, tag_field=kind.key, tag=name, frozen=True, kw_only=True
    )


def _reduce(record: type[Struct], kind: Kind, name: str, folder: Path | None) -> Callable[[Struct], object]:
    """Return the method by which records are pickled: the subclass is created again where they are read.

    Another process may have imported neither the module of the kind nor the plugin's file, so it loads a reference.
    """
    adapted = f"{record.__module__}:{record.__qualname__}" if kind.adapt is not None else None
    origin = folder or user_code.find_reference(record) or adapted or record

    def reduce(options: Struct) -> object:
        return _restore, (origin, kind.contract, name, msgspec.structs.asdict(options))

    return reduce


def _restore(origin: type[Struct] | Path | str, contract: type, name: str, fields: dict[str, Any]) -> Struct:
    kind = find_kind(contract)
    assert kind is not None
    if isinstance(origin, Path):
        record = Plugins(folder=origin).find(kind, name)
    else:
        loaded = user_code.load(origin) if isinstance(origin, str) else origin
        record = _with_name(kind.check(loaded, name), kind, name)
    assert record is not None
    return record(**fields)
