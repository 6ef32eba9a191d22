"""Pages as HTML, and the files of `static/`. Parts whose template block begins with `live_` are live.

A stream of live updates renders these blocks again and sends those that differ. Each is the content of the element with
the block's name as its id, so an update replaces exactly what the first response had.

`vendor/` has htmx, its extension for server-sent events and uPlot, unchanged; `vendor.lock.json` their SHA-256.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import jinja2

from fedplat._version import __version__
from fedplat.dashboard import formats
from fedplat.wire.v1 import admin_pb2

_LIVE = "live_"


@dataclasses.dataclass(frozen=True)
class Page:
    """A page: a template and its data. `job` is the job whose changes update it; `section` its entry of the menu."""

    template: str
    title: str
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    section: str = ""
    job: str = ""
    has_charts: bool = False
    is_live: bool = True
    status: int = 200


@dataclasses.dataclass(frozen=True)
class Frame:
    """What surrounds a page. `banner` is a sentence above it; `status` is None if the server did not answer."""

    address: str
    source_name: str = ""
    is_simulation: bool = False
    is_signed_in: bool = False
    status: admin_pb2.GetStatusResponse | None = None
    sections: tuple[tuple[str, str, str], ...] = ()
    """Name, address and title of each entry of the menu."""
    banner: str = ""

    @property
    def can_operate(self) -> bool:
        """True if the operator may change jobs and clients."""
        return self.status is not None and self.status.role in ("operator", "admin")


def _address_of(name: str) -> str:
    return ASSETS[name].address


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedplat.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(formats.FILTERS)
    values: dict[str, Any] = environment.globals  # typed as if it had the default values only
    values |= {"asset": _address_of, "version": __version__, "formats": formats, "percent": formats.percent}
    # Not imported by the templates: a block that is rendered alone does not have its template's imports.
    values["ui"] = environment.get_template("macros.html").module
    return environment


class Renderer:
    """The templates, which are compiled once in a process."""

    def __init__(self) -> None:
        self._environment = _environment()

    def page(self, page: Page, frame: Frame) -> str:
        """Return the whole page."""
        return self._environment.get_template(page.template).render(self._values(page, frame))

    def parts(self, page: Page, frame: Frame) -> dict[str, str]:
        """Return the live parts of a page, by the ids of their elements."""
        template = self._environment.get_template(page.template)
        blocks = self._environment.get_template("base.html").blocks | template.blocks
        context = template.new_context(self._values(page, frame))
        return {name: "".join(blocks[name](context)) for name in sorted(blocks) if name.startswith(_LIVE)}

    def _values(self, page: Page, frame: Frame) -> dict[str, Any]:
        moment = formats.virtual_moment if frame.is_simulation else formats.moment
        return {"page": page, "frame": frame, "moment": moment, **page.data}


def format_event(parts: Mapping[str, str]) -> bytes:
    """Return live parts as one server-sent event, which htmx swaps into the page."""
    lines = [
        f'<hx-partial hx-target="#{name}" hx-swap="innerMorph">{content}</hx-partial>'
        for name, content in parts.items()
    ]
    return "".join(f"data: {line}\n" for text in lines for line in text.splitlines()).encode() + b"\n"


def format_signal(name: str) -> bytes:
    """Return a named event without content, which the page's script handles."""
    return f"event: {name}\ndata: 1\n\n".encode()


STATIC_FOLDER: Traversable = resources.files("fedplat.dashboard") / "static"
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
    content = b"\n".join(STATIC_FOLDER.joinpath(*part.split("/")).read_bytes() for part in parts)
    return Asset(name, content, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest())


ASSETS = {name: _load(name, parts) for name, parts in _BUNDLES.items()}
