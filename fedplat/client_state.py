"""Client state: what a client stores between the rounds of one job, such as a control variate or personal layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from fedplat.model import Parameters

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class ClientState:
    """A client's state for one job while it works on one assignment: named entries.

    Changes take effect once the server has merged the update that they belong to: then `contents` are stored and passed
    to the `ClientState` of the client's next assignment. Otherwise they are discarded: the training is repeated.

    >>> import numpy as np
    >>> state = ClientState()
    >>> state.put("seen", Parameters.from_arrays({"count": np.array(1)}))
    >>> later = ClientState(state.contents)
    >>> int(later.get("seen")["count"])
    1
    """

    def __init__(self, contents: Mapping[str, Parameters] | None = None) -> None:
        """Start from the stored `contents`, which are not modified."""
        self._stored = dict(contents or {})
        self._entries = dict(self._stored)

    def get(self, name: str) -> Parameters | None:
        """Return the entry of that name, which must not be modified, or None."""
        return self._entries.get(name)

    def put(self, name: str, values: Parameters) -> None:
        """Set an entry; `values` must not be modified afterwards. Raises `ValueError` for an invalid one."""
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name of client state; expected 1 to 63 letters, digits, '_', '.' and '-'"
            )
        if not isinstance(cast(object, values), Parameters):
            raise ValueError(
                f"the client state {name!r} is a {type(values).__name__}; expected Parameters, such as "
                "Parameters.from_arrays(...)"
            )
        self._entries[name] = values

    def forget(self, name: str) -> None:
        """Delete an entry if it exists."""
        self._entries.pop(name, None)

    @property
    def contents(self) -> Mapping[str, Parameters]:
        """All current entries."""
        return dict(self._entries)

    @property
    def changed(self) -> bool:
        """True if any entry was set or deleted."""
        return self._entries.keys() != self._stored.keys() or any(
            values is not self._stored[name] for name, values in self._entries.items()
        )
