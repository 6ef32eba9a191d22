"""Contexts: an operator's profiles by name, and which of them is in use.

They are files in the folder of the user's configuration: `profile.toml` is the context `default`, the others are
`contexts/NAME.toml`. The file `context` holds the name of the one in use; without it, `default` is in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from pathlib import Path

from fedplat import durable, system, texts
from fedplat.admin import profile
from fedplat.config import toml
from fedplat.errors import ProfileError

DEFAULT = "default"
VARIABLE = "FEDPLAT_CONTEXT"
"""The variable that names a context instead of the one in use."""
_NAME = re.compile(texts.NAME_PATTERN)
_MAX_NAME_BYTES = 64


@dataclasses.dataclass(frozen=True)
class NamedProfile:
    """A context in a list. `mistake` is what is wrong with its profile; `server` is empty if it cannot be used."""

    name: str
    is_current: bool
    server: str
    path: str
    mistake: str = ""


@dataclasses.dataclass(frozen=True)
class ContextStore:
    """The contexts in a folder, which need not exist. All methods raise `ProfileError`."""

    folder: Path

    @classmethod
    def of_user(cls) -> ContextStore:
        """Return the contexts of this user. Raises `ProfileError` for a user without a home directory."""
        return cls(profile.default_path().parent)

    @property
    def current(self) -> str:
        """The name of the context in use, which may have been removed."""
        path = self.folder / "context"
        try:
            with path.open("rb") as file:
                name = file.read(_MAX_NAME_BYTES + 1).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return DEFAULT
        except OSError as exc:
            raise ProfileError(f"the file {path} with the context in use cannot be read: {exc.strerror}") from exc
        if not _NAME.fullmatch(name):
            raise ProfileError(f"the file {path} has no name of a context; write it with: fedplat context use NAME")
        return name

    def names(self) -> list[str]:
        """Return the names of all contexts: `default` first, then the others in order of the alphabet."""
        try:
            stored = sorted(path.stem for path in (self.folder / "contexts").iterdir() if path.suffix == ".toml")
        except (FileNotFoundError, NotADirectoryError):
            stored = []
        except OSError as exc:
            raise ProfileError(f"the contexts in {self.folder} cannot be read: {exc.strerror}") from exc
        first = [DEFAULT] if self.locate(DEFAULT).exists() else []
        return [*first, *(name for name in stored if name != DEFAULT and _NAME.fullmatch(name))]

    def locate(self, name: str) -> Path:
        """Return the path of a context's profile, whether it exists or not."""
        if not _NAME.fullmatch(name):
            raise ProfileError(
                f"{texts.quote(name)} is no name of a context; expected 1 to 63 letters, digits or _.- (alphanumeric "
                "first), such as production"
            )
        return self.folder / "profile.toml" if name == DEFAULT else self.folder / "contexts" / f"{name}.toml"

    def find(self, name: str) -> Path:
        """Return the path of the profile of a context that exists."""
        path = self.locate(name)
        if not path.exists():
            known = self.names()
            expected = f"expected one of {', '.join(known)}" if known else "add it with: fedplat context add NAME FILE"
            raise ProfileError(f"there is no context {name}{toml.suggest(name, known) or f'; {expected}'}")
        return path

    def describe(self, name: str) -> NamedProfile:
        """Return a context that exists."""
        path, is_current = self.find(name), name == self.current
        try:
            return NamedProfile(name, is_current, profile.load(path).server, str(path), _describe_mode(path))
        except ProfileError as exc:
            return NamedProfile(name, is_current, "", str(path), str(exc))

    def add(self, name: str, added: profile.Profile) -> None:
        """Store a profile under a name that is free, for its owner alone."""
        path = self.locate(name)
        if path.exists():
            raise ProfileError(
                f"the context {name} exists already; remove it first with: fedplat context remove {name}"
            )
        self._make_folder()
        profile.save(added, path)

    def use(self, name: str) -> NamedProfile:
        """Use a context from now on, if its profile is valid."""
        profile.load(self.find(name))
        try:
            durable.write_bytes(self.folder / "context", f"{name}\n".encode())
        except OSError as exc:
            raise ProfileError(f"the context in use cannot be stored in {self.folder}: {exc.strerror}") from exc
        return self.describe(name)

    def remove(self, name: str) -> NamedProfile:
        """Remove a context with its profile; if it is in use, `default` is used from now on."""
        path, removed = self.find(name), self.describe(name)
        try:
            if removed.is_current:
                (self.folder / "context").unlink(missing_ok=True)
            path.unlink()
            durable.sync(path.parent)
        except OSError as exc:
            raise ProfileError(f"the context {name} cannot be removed: {exc.strerror}") from exc
        return removed

    def _make_folder(self) -> None:
        with contextlib.suppress(OSError):  # then the write fails, with a better error
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _describe_mode(path: Path) -> str:
    """Return what is wrong with the permissions of a profile, which has a secret; empty if nothing is."""
    found = path.stat()
    if os.name == "posix" and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and found.st_uid == system.user_id():
        return f"other users can read the token: chmod 600 {path}"
    return ""
