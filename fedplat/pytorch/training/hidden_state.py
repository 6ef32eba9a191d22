"""What a module remembers outside its `state_dict`: counters, buffers, and generators, also of the code it refers to.

A real client makes a new module for each task. An engine trains many clients with one module, so it has to forget what
it remembers of the client before; otherwise results depend on who was trained in the same process.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""The attributes that PyTorch's base class manages: parameters, buffers, hooks and the like."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MISSING = object()


@dataclass
class _Entry:
    """An attribute of an object as it was at first: the value itself, its version if it is a tensor, and a copy."""

    owner: dict[str, Any]
    name: str
    value: Any
    version: int
    saved: Any


class HiddenState:
    """The state of a module, and of a loss that is an object, as it is now; `restore` returns to it.

    Generators of random numbers are also found in functions and classes: in closures, defaults, arguments of a
    `functools.partial`, class variables, and the globals that a function names. What has no copy, such as an open file,
    stays as it is.
    """

    def __init__(self, module: nn.Module, loss: object) -> None:
        self.has_changed = False
        """True once a restored module had changed: a computation of it cannot be recorded."""
        own = [*module.modules()]
        of_loss = [part for part in loss.modules() if part not in own] if isinstance(loss, nn.Module) else []
        parts = [*own, *of_loss]
        known = [*parts, *module.parameters(), *module.buffers()]
        self._memo = {id(each): each for each in known}  # these are not copied with what refers to them
        self._copies = dict(self._memo)
        self._owners: list[tuple[dict[str, Any], frozenset[str]]] = []
        self._entries: list[_Entry] = []
        for part in own:
            self._add_buffers(vars(part)["_buffers"], vars(part)["_non_persistent_buffers_set"])
        for part in of_loss:  # no buffer of a loss is in the model
            self._add_buffers(vars(part)["_buffers"], vars(part)["_buffers"])
        for part in parts:
            if not type(part).__module__.startswith("torch.nn."):
                self._add_attributes(vars(part))
        self._generators = list(_remember([loss, *(type(part) for part in parts)]))
        if not isinstance(loss, nn.Module) and (owner := _attributes_of(loss)) is not None:
            self._add_attributes(owner)

    def is_changed(self) -> bool:
        """Return whether the module remembers something since it was restored."""
        self.has_changed = self.has_changed or any(True for _ in self._changes()) or any(self._find_drawn())
        return self.has_changed

    def restore(self) -> None:
        """Forget what was remembered since the beginning."""
        for generator, state in self._find_drawn():
            self.has_changed = True
            set_generator(generator, state)
        for owner, name, entry in list(self._changes()):
            self.has_changed = True
            if entry is None:
                del owner[name]
            elif owner.get(name) is entry.value and isinstance(entry.value, torch.Tensor):
                with torch.no_grad():  # in place: others may refer to it
                    entry.value.copy_(entry.saved)
                entry.version = _version(entry.value)
            else:
                entry.value = owner[name] = self._copy(entry.saved, dict(self._memo))
                entry.version = _version(entry.value)

    def _find_drawn(self) -> Iterator[tuple[Generator, Any]]:
        """Yield the generators of functions and classes that have drawn numbers, with their first states."""
        return ((each, state) for each, state in self._generators if not _equal(read_generator(each), state))

    def _changes(self) -> Iterator[tuple[dict[str, Any], str, _Entry | None]]:
        """Yield the attributes that differ from the first ones; those that are new have no entry."""
        for entry in self._entries:
            now = entry.owner.get(entry.name, _MISSING)
            if now is entry.value and (
                isinstance(now, _SIMPLE) or (isinstance(now, torch.Tensor) and now._version == entry.version)
            ):
                continue
            if not _equal(now, entry.saved):
                yield entry.owner, entry.name, entry
        for owner, names in self._owners:
            yield from ((owner, name, None) for name in owner.keys() - names)

    def _add_buffers(self, owner: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if (buffer := owner[name]) is not None:
                self._entries.append(_Entry(owner, name, buffer, _version(buffer), buffer.detach().clone()))

    def _add_attributes(self, owner: dict[str, Any]) -> None:
        self._owners.append((owner, frozenset(owner)))
        for name in owner.keys() - _OF_ALL_MODULES:
            self._add(owner, name)

    def _add(self, owner: dict[str, Any], name: str) -> None:
        value = owner[name]
        try:
            saved = self._copy(value, self._copies)  # what several modules share is copied once
        except Exception:  # whatever the owner's objects raise: they stay as they are
            return
        self._entries.append(_Entry(owner, name, value, _version(value), saved))

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in self._memo:
            return value.detach().clone()
        return copy.deepcopy(value, memo)


def _remember(roots: Iterable[object]) -> Iterator[tuple[Generator, Any]]:
    for generator in find_generators(roots):
        with suppress(NotImplementedError):  # random.SystemRandom
            yield generator, read_generator(generator)


def _version(value: object) -> int:
    """Return the number of changes of a tensor in place; 0 for other values, which have to be compared."""
    return value._version if isinstance(value, torch.Tensor) else 0


def _attributes_of(loss: object) -> dict[str, Any] | None:
    """Return the attributes of an object of the user's own class, or of one whose method the loss is."""
    owner = loss.__self__ if isinstance(loss, MethodType) else loss
    kind = type(owner).__module__.partition(".")[0]
    return vars(owner) if hasattr(owner, "__dict__") and kind not in _LIBRARIES else None


_LIBRARIES = frozenset({"builtins", "functools", "fedplat", "torch"})


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, as far as they can be compared."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(each, other[name]) for name, each in one.items())
    if isinstance(one, Sequence | deque) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(_equal, one, other))
    if (state := _state_of(one)) is not None:
        return _equal(state, _state_of(other))
    try:
        return bool(one == other)
    except Exception:  # an __eq__ of the owner's
        return False


def _state_of(value: Any) -> Any | None:
    """Return what an object remembers, if it is not compared by its values."""
    match value:
        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            return read_generator(value)
        case nn.Module():
            return None  # compared by its identity
        case _ if hasattr(value, "__dict__") and type(value).__eq__ is object.__eq__:
            return vars(value)
        case _:
            return None


Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
_WITHOUT_GENERATORS = sys.stdlib_module_names | {"fedplat", "numpy", "torch"}
_OF_THE_PROCESS = [
    torch.default_generator,
    np.random.random.__self__,
    random.random.__self__,
]  # seeded for each training
_MAX_OBJECTS = 10_000
"""Objects that are looked at; what a function refers to may be large."""


def find_generators(roots: Iterable[object]) -> list[Generator]:
    """Return the generators that functions and classes of the user refer to, without those of the process."""
    found: list[Generator] = []
    waiting, seen = list(roots), set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or any(value is each for each in _OF_THE_PROCESS):
            continue
        seen.add(id(value))
        if isinstance(value, Generator):
            found.append(value)
        else:
            waiting.extend(_find_parts(value))
    return found


def read_generator(generator: Generator) -> Any:
    """Return the state of a generator. Raises `NotImplementedError` for one without, such as `SystemRandom`."""
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=True)
        case random.Random():
            return generator.getstate()
        case torch.Generator():
            return generator.get_state()


def set_generator(generator: Generator, state: Any) -> None:
    """Set the state of a generator, in place: others may refer to it."""
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState() | torch.Generator():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)


def _find_parts(value: object) -> Iterable[object]:
    """Return what an object refers to, if it is the user's, a `functools.partial`, or a small collection."""
    match value:
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case MethodType():
            return [value.__func__, value.__self__]
        case FunctionType():
            return [] if _is_library(value.__module__) else _find_used(value)
        case staticmethod() | classmethod():
            return [cast(Any, value).__func__]
        case list() | tuple() | set() | frozenset():
            return list(cast(Iterable[object], value)) if len(cast(list[object], value)) < _MAX_OBJECTS else []
        case dict():
            return list(cast(dict[object, object], value).values())
        case type():
            return [part for kind in value.__mro__ if not _is_library(kind.__module__) for part in vars(kind).values()]
        case _:
            if _is_library(type(value).__module__):
                return []
            return [type(value), *(vars(value).values() if hasattr(value, "__dict__") else ())]


def _find_used(function: FunctionType) -> Iterator[object]:
    """Yield what a function has in its closure, its defaults and its attributes, and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name without a value yet
            continue
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values())
    for name in _find_names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _find_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:  # functions in the function
        if isinstance(part, CodeType):
            yield from _find_names(part)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _WITHOUT_GENERATORS
