"""Pages as HTML, and the files of `static/`. Parts whose template block begins with `live_` are live.

A stream of live updates renders these blocks again and sends those that differ. Each is the content of the element with
the block's name as its id, so an update replaces exactly what the first response had.

`vendor/` has htmx, its extension for server-sent events and uPlot, unchanged; `vendor.lock.json` their SHA-256.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import jinja2

from fedplat.dashboard import formats
from fedplat.web import rendering as web
from fedplat.web.rendering import load_assets, make_environment
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
    def badges(self) -> Mapping[str, int]:
        """Numbers beside entries of the menu."""
        return {"alerts": self.status.num_alerts} if self.status is not None else {}

    @property
    def can_operate(self) -> bool:
        """True if the operator may change jobs and clients."""
        return self.status is not None and self.status.role in ("operator", "admin")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = make_environment("fedplat.dashboard", ASSETS)
    environment.filters.update(formats.FILTERS)
    values: dict[str, Any] = environment.globals  # typed as if it had the default values only
    values |= {"formats": formats, "percent": formats.percent}
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
        outer = [self._environment.get_template(name).blocks for name in ("web/layout.html", "base.html")]
        blocks = outer[0] | outer[1] | template.blocks
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
_VENDOR = STATIC_FOLDER / "vendor"
ASSETS = load_assets(
    {
        "dashboard.js": (
            _VENDOR / "htmx.min.js",
            _VENDOR / "hx-sse.min.js",
            web.STATIC_FOLDER / "pages.js",
            STATIC_FOLDER / "dashboard.js",
        ),
        "charts.js": (_VENDOR / "uPlot.iife.min.js", STATIC_FOLDER / "charts.js"),
        "dashboard.css": (_VENDOR / "uPlot.min.css", web.STATIC_FOLDER / "pages.css"),
        "icon.svg": (web.STATIC_FOLDER / "icon.svg",),
    }
)
