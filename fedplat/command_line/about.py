"""What `--version` and `version` print: the same lines for all programs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re

from fedplat.wire import PROTOCOL_VERSION


def format_version(program: str, version: str) -> str:
    """Return the line of `--version`.

    >>> format_version("fedplat-server", "0.2.0")
    'fedplat-server 0.2.0'
    """
    return f"{program} {version}"


def format_about(program: str, version: str, *, as_json: bool = False) -> str:
    """Return what `version` prints: the versions of the program, of Python and of the protocol, and its extras."""
    extras = find_extras(program)
    if as_json:
        facts = {"program": program, "version": version, "python": platform.python_version()}
        return json.dumps(facts | {"protocol": PROTOCOL_VERSION, "extras": extras})
    installed = ", ".join(name for name, is_there in extras.items() if is_there)
    absent = ", ".join(name for name, is_there in extras.items() if not is_there)
    return "\n".join(
        (
            format_version(program, version),
            f"python    {platform.python_version()}",
            f"protocol  {PROTOCOL_VERSION}",
            f"extras    {installed or 'none'}" + (f" (not installed: {absent})" if absent else ""),
        )
    )


def find_extras(distribution: str) -> dict[str, bool]:
    """Return the extras of a distribution, and whether the packages of each are installed, in any version."""
    try:
        found = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # the source is on the path, and nothing is installed
        return {}
    return {name: _has_extra(distribution, name) for name in sorted(found)}


def _has_extra(distribution: str, extra: str) -> bool:
    for line in importlib.metadata.requires(distribution) or []:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker):
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([a-z0-9,-]+)\])?", requirement)
        assert match is not None, requirement
        try:
            importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            return False
        own = (match[2] or "").split(",") if match[1].startswith("fedplat") else []
        if not all(_has_extra(match[1], each) for each in own if each):
            return False
    return True
