"""The options before the command: the profile, and what replaces parts of it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec

from fedplat.admin import profile
from fedplat.errors import MissingProfileError, ProfileError


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options given before the command."""

    server: str | None = None
    as_json: bool = False
    profile: Path | None = None
    ca: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None

    def resolve(self, server: str | None) -> profile.Profile:
        """Return the profile, overridden by the command line and the environment. Raises `ProfileError`."""
        token = os.environ.get("FEDPLAT_TOKEN")
        found = self._load_profile(is_needed=not token)
        changes: dict[str, Any] = {}
        if server or self.server:
            changes["server"] = server or self.server
        if self.ca is not None:
            changes["ca"] = profile.load_ca(self.ca)
        if self.insecure:
            changes["insecure"] = True
        if token:
            changes["token"] = token
        return msgspec.structs.replace(found, **changes)

    def _load_profile(self, *, is_needed: bool) -> profile.Profile:
        """Return the stored profile; an empty one if none is stored or needed."""
        try:
            path = self.profile if self.profile is not None else profile.default_path()
        except ProfileError:
            if is_needed:
                raise
            return profile.Profile()
        if self.profile is not None or path.exists():
            return profile.load(path)
        if is_needed:
            raise MissingProfileError(
                f"there is no profile at {path}; expected one there, or --profile FILE or FEDPLAT_PROFILE. "
                "fedplat-server dev writes it on this machine; fedplat-server init writes the first profile on the "
                "server's machine (DATA_DIR/admin.toml)"
            )
        return profile.Profile()
