"""An immutable map that shares most of its content with the map that it was derived from.

It holds the assignments of an attempt. A report changes one of thousands of them, and every step makes a new state:
copying a plain dictionary each time costs time and memory with the square of the cohort (a batch of a thousand reports
held a thousand copies). Here a step copies about sqrt(cohort) entries: a map is a shared base, and a small dictionary
of the items changed since the base was made.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

from typing_extensions import override

_Value = TypeVar("_Value")
_ABSENT: Any = object()


class PersistentMap(Mapping[str, _Value], Generic[_Value]):
    """An immutable map in order of insertion; equal to any mapping with the same items.

    >>> before = PersistentMap({"a": 1, "b": 2})
    >>> after = before.update({"b": 3})
    >>> dict(before), dict(after), after.changed_since(before)
    ({'a': 1, 'b': 2}, {'a': 1, 'b': 3}, (3,))
    """

    __slots__ = ("_base", "_recent")

    def __init__(self, items: Mapping[str, _Value] | None = None) -> None:
        self._base: dict[str, _Value] = dict(items or {})
        self._recent: dict[str, _Value] = {}

    def update(self, changed: Mapping[str, _Value]) -> PersistentMap[_Value]:
        """Return this map with some items added or replaced."""
        after: PersistentMap[_Value] = PersistentMap()
        after._base, after._recent = self._base, {**self._recent, **changed}
        # Copying r recent items in each step, and n of the base every r steps, is cheapest at r = sqrt(2 n).
        if len(after._recent) ** 2 > 2 * len(after._base):
            after._base, after._recent = {**after._base, **after._recent}, {}
        return after

    def changed_since(self, before: Mapping[str, _Value]) -> tuple[_Value, ...]:
        """Return the values that are missing or different in `before`."""
        # Plain dictionaries are compared: access through `Mapping` takes ten times as long per entry.
        if isinstance(before, PersistentMap) and before._base is self._base:
            now, then = self._recent, before._recent
            names = [name for name, value in now.items() if then.get(name, _ABSENT) is not value]
            names += [name for name in then if name not in now]
        else:
            then = before._merge() if isinstance(before, PersistentMap) else before
            names = [name for name, value in self._merge().items() if then.get(name, _ABSENT) is not value]
        return tuple(self[name] for name in names if name in self and before.get(name) is not self[name])

    def __getitem__(self, name: str) -> _Value:
        return self._recent[name] if name in self._recent else self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._merge())

    def __len__(self) -> int:
        return len(self._base) + sum(name not in self._base for name in self._recent)

    @override
    def values(self) -> ValuesView[_Value]:
        return self._merge().values()

    @override
    def items(self) -> ItemsView[str, _Value]:
        return self._merge().items()

    def __repr__(self) -> str:
        return f"PersistentMap({self._merge()!r})"

    def _merge(self) -> Mapping[str, _Value]:
        return {**self._base, **self._recent} if self._recent else self._base


def to_persistent(items: Mapping[str, _Value]) -> PersistentMap[_Value]:
    """Convert a mapping to a persistent map; a persistent map is returned as it is."""
    return items if isinstance(items, PersistentMap) else PersistentMap(items)
