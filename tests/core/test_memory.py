"""What a client remembers."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.client_state import ClientState
from fedplat.model import Parameters


def note(value: float) -> Parameters:
    return Parameters.from_arrays({"x": np.array([value], np.float32)})


def test_what_is_written_leaves_what_was_before_alone() -> None:
    before = {"a": note(1), "b": note(2)}
    memory = ClientState(before)
    assert not memory.changed
    memory.put("a", note(3))
    memory.forget("b")
    memory.forget("b")
    assert memory.changed
    assert memory.contents == {"a": note(3)}
    assert (memory.get("a"), memory.get("b")) == (note(3), None)
    assert before == {"a": note(1), "b": note(2)}


def test_forgetting_is_a_change() -> None:
    memory = ClientState({"a": note(1)})
    memory.forget("a")
    assert memory.changed


@pytest.mark.parametrize("name", ["", "a/b", "x" * 64])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        ClientState().put(name, note(1))
