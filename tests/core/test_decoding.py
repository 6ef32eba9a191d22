"""Records that several threads decode for the first time at once: no crash, whatever the order of their first uses."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from fedplat.config.decoding import prepare_type

RACE = """
    import sys, threading
    from typing import Annotated

    import msgspec

    from fedplat.config.decoding import prepare_type

    sys.setswitchinterval(1e-6)
    size = Annotated[int, msgspec.Meta(ge=0)]
    names = [f"field_{number}" for number in range(20)]
    content = msgspec.json.encode({"inner": dict.fromkeys(names, 1)})
    for turn in range(100):
        inner = msgspec.defstruct("Inner", [(name, size) for name in names])
        outer = msgspec.defstruct("Outer", [("inner", inner), *((name, dict[str, size], {}) for name in names)])
        start = threading.Barrier(8)

        def decode():
            start.wait()
            msgspec.json.decode(content, type=prepare_type(outer))

        threads = [threading.Thread(target=decode) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
"""


def test_many_threads_decode_a_new_record() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(RACE)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unsupported_type_is_refused() -> None:
    with pytest.raises(TypeError, match="more than one"):
        prepare_type(dict[str, int] | list[int] | tuple[int, ...])  # type: ignore[arg-type]
