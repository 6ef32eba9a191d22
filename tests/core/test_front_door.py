"""`import fedplat` has the names that most programs need, and loads each when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fedplat

HOMES = {
    "AdminClient": "fedplat.admin",
    "Dataset": "fedplat.simulation",
    "Federation": "fedplat.simulation",
    "JobSpec": "fedplat.job",
    "Learner": "fedplat.pytorch.training",
    "Parameters": "fedplat.model",
    "Run": "fedplat.simulation",
    "__version__": "fedplat._version",
    "compare": "fedplat.simulation",
    "parse_job": "fedplat.job",
    "simulate": "fedplat.simulation",
}
PROGRAM = """
import sys
import fedplat
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("fedplat", "msgspec", "numpy")))
sys.modules["torch"] = None
from fedplat.errors import MissingExtraError
try:
    fedplat.Learner
except MissingExtraError as exc:
    print(exc)
"""


def test_the_names_are_those_of_their_modules() -> None:
    assert fedplat.__all__ == list(HOMES)
    for name, module in HOMES.items():
        assert getattr(fedplat, name) is getattr(importlib.import_module(module), name)
    assert set(HOMES) <= set(dir(fedplat))


def test_the_name_that_release_0_1_documented_is_kept() -> None:
    from fedplat import plugins
    from fedplat.config.plugins import Plugins

    assert plugins.Plugins is Plugins
    assert plugins.__all__ == ["Plugins"]


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fedplat' has no attribute 'simulat'$") as raised:
        getattr(fedplat, "simulat")  # noqa: B009 -- a type checker refuses the attribute
    assert (raised.value.name, raised.value.obj) == ("simulat", fedplat)  # Python suggests a similar name
    with pytest.raises(ImportError, match="cannot import name 'simulat'"):
        exec("from fedplat import simulat")


def test_the_import_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    loaded, error = done.stdout.splitlines()
    assert loaded.split() == ["fedplat", "fedplat._version"]
    assert error.startswith("Learner needs PyTorch; install it with: ")
