"""The environment of processes that run other code than the daemon's: without its passwords, tokens and keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

KEPT = "FEDPLAT_CHILD_VARIABLES"
"""The variable that lists, with commas, others that are kept: for instance AWS_PROFILE, if an evaluator needs it."""
_PREFIXES = ("FEDPLAT_", "PG", "AWS_", "AZURE_", "GOOGLE_", "OTEL_")
"""The settings of the daemon and of its database, object store and receiver of traces."""
_SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|TOKENS?(_|$)|(^|_)(PASS|PWD|PAT|AUTH|DSN)(_|$)"
    r"|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION)_?KEYS?(_|$)|_KEYS?$",
    re.IGNORECASE,
)
_URL_WITH_USER = re.compile(r"://[^/\s@]+@")


def child_environment(daemon: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the daemon that others may see.

    >>> child_environment({"PATH": "/bin", "PGPASSWORD": "x", "DB": "mysql://me:x@db", "HF_TOKEN": "x", "PWD": "/"})
    {'PATH': '/bin', 'PWD': '/'}
    """
    kept = {name.strip() for name in daemon.get(KEPT, "").split(",")}
    return {name: value for name, value in daemon.items() if name in kept or not _is_secret(name, value)}


def _is_secret(name: str, value: str) -> bool:
    if name.startswith(_PREFIXES):
        return True
    if name in ("PWD", "OLDPWD"):  # folders
        return False
    is_proxy = name.lower().endswith("_proxy")  # without it, a network may be out of reach
    return _SECRET_NAME.search(name) is not None or (_URL_WITH_USER.search(value) is not None and not is_proxy)
