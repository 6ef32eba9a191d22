"""The command that installs what an error message asks for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from pathlib import Path


def install_command(extra: str, distribution: str = "fedplat") -> str:
    """Return the command that adds the packages of an extra to this environment: `pip install 'pyarrow>=24'`.

    It names the packages, not the distribution with its extra: fedplat may have been installed from a clone or from
    wheels, and then pip would look for a project of that name on an index. Tools of pipx and environments of uv have no
    pip of their own.
    """
    packages = shlex.join(dict.fromkeys(_requirements(extra, distribution)))
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {prefix.name} {packages}"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {shlex.quote(sys.executable)} {packages}"
    return f"pip install {packages}"


def _requirements(extra: str, distribution: str) -> list[str]:
    """Return the packages of an extra, also those of the extras of other distributions that it names."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # the source is on the path, and nothing is installed
        lines = []
    found: list[str] = []
    for line in lines:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker):
            continue
        own = re.match(r"(fedplat[a-z-]*)\[([a-z0-9,-]+)\]", requirement)
        found += [each for name in own[2].split(",") for each in _requirements(name, own[1])] if own else [requirement]
    return found or [f"{distribution}[{extra}]"]
