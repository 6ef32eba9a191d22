"""What a client remembers of a job from round to round: a control variate, personal layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedplat.model import Parameters

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class ClientState:
    """A client's notes of one job, by name, while it works on one assignment.

    What is written counts only once the server has merged the update that it belongs to: then `contents` are kept, and
    given to the `ClientState` of the client's next assignment. Else they are thrown away, because the training is done
    again.

    >>> import numpy as np
    >>> memory = Memory()
    >>> memory.put("seen", Parameters.from_arrays({"count": np.array(1)}))
    >>> later = Memory(memory.contents)
    >>> int(later.get("seen")["count"])
    1
    """

    def __init__(self, contents: Mapping[str, Parameters] | None = None) -> None:
        """`contents` is what was kept before; it is not changed."""
        self._before = dict(contents or {})
        self._now = dict(self._before)

    def get(self, name: str) -> Parameters | None:
        """What was noted by that name, to be read only; None if nothing was."""
        return self._now.get(name)

    def put(self, name: str, values: Parameters) -> None:
        """Notes values, which are not to be changed afterwards. Raises `ValueError` for a name that is none."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a note; expected at most 63 letters, digits, '_', '.' and '-'")
        self._now[name] = values

    def forget(self, name: str) -> None:
        """Throws a note away, if there is one."""
        self._now.pop(name, None)

    @property
    def contents(self) -> Mapping[str, Parameters]:
        """All notes, as they are now."""
        return dict(self._now)

    @property
    def changed(self) -> bool:
        """Whether something was written."""
        return self._now.keys() != self._before.keys() or any(
            values is not self._before[name] for name, values in self._now.items()
        )
