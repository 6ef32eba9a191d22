"""Imports every module of packages: python tests/pythons/imports.py PACKAGE...

The output has a line for each missing package of an extra, and then the number of modules that were imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Sequence

PROGRAMS = frozenset({"__main__", "migrations", "templates"})
"""Parts of the names of modules that are not imported, but run."""


def import_all(packages: Sequence[str]) -> None:
    """Raise `ModuleNotFoundError` for a missing module of the packages themselves, or of Python."""
    missing = Counter[str]()
    count = 0
    for package in packages:
        folders = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(folders, f"{package}.", lambda name: None):
            if not PROGRAMS.isdisjoint(found.name.split(".")):
                continue
            try:
                importlib.import_module(found.name)
                count += 1
            except Exception as exc:
                cause: BaseException | None = exc
                while type(cause).__name__ == "MissingExtraError":  # of the core, or of the client after one of those
                    cause = cause.__cause__ if cause is not None else None
                library = (getattr(cause, "name", None) or "").partition(".")[0]
                if (
                    not isinstance(cause, ModuleNotFoundError)
                    or library in ("", *packages)
                    or library in sys.stdlib_module_names
                ):
                    raise
                missing[library] += 1
    for library, num_modules in sorted(missing.items()):
        print(f"{library} is missing: {num_modules} modules need it")
    print(f"{count} modules imported")


if __name__ == "__main__":
    import_all(sys.argv[1:])
