"""Runs a module as a program, or imports the whole product, with the names of another system hidden from everything.

python tests/portability/program.py macos|windows MODULE [ARGUMENTS]
python tests/portability/program.py macos|windows --import
"""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from portability import hide
from pythons.imports import import_all

PACKAGES = ("fedplat", "fedplat_client")


def hide_from_product(system: str, module: str) -> None:
    """Hide the names after libraries have been imported, which ask for the system, not for its names."""
    if module == "--import":
        with contextlib.redirect_stdout(io.StringIO()):
            import_all(PACKAGES)
    for library in (module, "torch._dynamo", "psutil", "platformdirs.unix"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(library)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    hide.hide_from_all(system)


if __name__ == "__main__":
    _, system, module, *arguments = sys.argv
    hide_from_product(system, module)
    if module == "--import":
        import_all(PACKAGES)
    else:
        sys.argv = [module, *arguments]
        sys.path.insert(0, "")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
