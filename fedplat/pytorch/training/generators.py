"""Generators of random numbers that a function or a class refers to: in closures, defaults, attributes and globals."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import numpy as np
import torch

Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
_LIBRARIES = sys.stdlib_module_names | {"fedplat", "numpy", "torch"}
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


def read_state(generator: Generator) -> Any:
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


def set_state(generator: Generator, state: Any) -> None:
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
    return (module or "").partition(".")[0] in _LIBRARIES
