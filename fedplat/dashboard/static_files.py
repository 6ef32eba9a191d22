"""The files of `static/`, read once: scripts, styles and the icon. Nothing is loaded from another server.

`vendor/` has htmx, its extension for server-sent events and uPlot, unchanged; `vendor.lock.json` their SHA-256.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

FOLDER: Traversable = resources.files("fedplat.dashboard") / "static"
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
_BUNDLES = {
    "dashboard.js": ("vendor/htmx.min.js", "vendor/hx-sse.min.js", "dashboard.js"),
    "charts.js": ("vendor/uPlot.iife.min.js", "charts.js"),
    "dashboard.css": ("vendor/uPlot.min.css", "dashboard.css"),
    "icon.svg": ("icon.svg",),
}
"""Files that are sent as one, so that a page needs few requests."""


@dataclasses.dataclass(frozen=True)
class Asset:
    """A file that pages refer to. Its address has a part of its hash, so browsers may keep it for a year."""

    name: str
    content: bytes
    compressed: bytes
    digest: str

    @property
    def address(self) -> str:
        """The path of the file."""
        return f"/static/{self.digest[:12]}/{self.name}"

    @property
    def media_type(self) -> str:
        """The content type."""
        return _TYPES[self.name.rpartition(".")[2]]


def _load(name: str, parts: tuple[str, ...]) -> Asset:
    content = b"\n".join(FOLDER.joinpath(*part.split("/")).read_bytes() for part in parts)
    return Asset(name, content, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest())


ASSETS = {name: _load(name, parts) for name, parts in _BUNDLES.items()}
