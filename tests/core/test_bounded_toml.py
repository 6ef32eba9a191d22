"""TOML texts whose keys would take gigabytes are refused before they are parsed; all others are read as before."""

from __future__ import annotations

import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from fedplat.admin import profile
from fedplat.config import toml
from fedplat.config.toml import read_toml
from fedplat.errors import FedplatError
from fedplat.flower.app import read_app
from fedplat.sweep import file as sweep_file

LONG = ".a" * 5000
REFUSED = [
    f"a{LONG} = 1",
    f'"a"{LONG} = 1',
    "a" + " . 'a'" * 5000 + " = 1",
    f"[a{LONG}]",
    f"x = {{ a{LONG} = 1 }}",
    f'x = """ # """ # "\na{LONG} = 1',
    f"x = '''a''''\ny = '#'\na{LONG} = 1",
    f'x = "\\"#"\na{LONG} = 1',
    "\n".join(f"k{number}" + ".a" * 30 + " = 1" for number in range(4000)),
]
READ = [
    "x = [" + "0.5, " * 10_000 + "1.5]",
    'x = "' + "a." * 5000 + '"',
    'x = """' + "a.b.c. " * 5000 + '"""',
    "# " + "." * 5000,
    "\n".join(f"x.y{number} = 1979-05-27T07:32:00.5" for number in range(5000)),
    "a" + ".a" * 31 + " = 1",
]


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_keys_that_would_take_gigabytes_are_refused(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(tomllib.TOMLDecodeError, match=r"more than 32 parts|too many dotted keys"):
            toml.loads(text)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", READ, ids=range(len(READ)))
def test_other_texts_are_read(text: str) -> None:
    assert toml.loads(text) == tomllib.loads(text)


def test_all_readers_refuse_them(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(f"a{LONG} = 1")
    readers: list[Callable[[], object]] = [
        lambda: read_toml(file.read_text()),
        lambda: read_app(tmp_path),
        lambda: sweep_file.read(file),
        lambda: profile.load(file),
    ]
    for read in readers:
        with pytest.raises(FedplatError, match="32 parts"):
            read()
