"""What the ranks of a group find in cases, which they compute when a test asks for them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from support.ranks.group import RankError, RankGroup

Key = TypeVar("Key")
Found = TypeVar("Found", bound=msgspec.Struct)


class Cases(Generic[Key, Found]):
    """The results of all ranks by the key of a case.

    The group computes no case that no test needs, for instance since tests of the same module run in another process.
    """

    def __init__(
        self, group: RankGroup, backend: str, run: str, found: type[Found], cases: Mapping[Key, msgspec.Struct]
    ) -> None:
        self.backend = backend
        self._group, self._run, self._type, self._cases = group, run, found, cases
        self._found: dict[Key, list[Found]] = {}
        self._error: RankError | None = None

    def __getitem__(self, key: Key) -> list[Found]:
        if key not in self._found:
            if self._error is not None:
                raise self._error  # the replies of the other ranks may be missing
            try:
                replies = self._group.call(self._run, cases=[msgspec.to_builtins(self._cases[key])])
            except RankError as exc:
                self._error = exc
                raise
            self._found[key] = [msgspec.convert(reply, self._type) for (reply,) in replies]
        return self._found[key]
