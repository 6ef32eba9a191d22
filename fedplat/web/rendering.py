"""Templates, and the files that pages refer to. What all programs have in common is in `templates/` and `static/`."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import jinja2
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedplat import texts
from fedplat._version import __version__

STATIC_FOLDER: Traversable = resources.files("fedplat.web") / "static"
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
_YEAR_S = 31_536_000
NOTHING = "-"


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


def load_assets(bundles: Mapping[str, Sequence[Traversable]]) -> dict[str, Asset]:
    """Return files by their names; each is sent as one, of several parts, so that a page needs few requests."""
    return {name: _load(name, parts) for name, parts in bundles.items()}


def _load(name: str, parts: Sequence[Traversable]) -> Asset:
    content = b"\n".join(part.read_bytes() for part in parts)
    return Asset(name, content, gzip.compress(content, mtime=0), hashlib.sha256(content).hexdigest())


def asset_route(assets: Mapping[str, Asset]) -> Route:
    """Return the route of the files."""

    async def serve(request: Request) -> Response:
        asset = assets.get(request.path_params["name"])
        if asset is None or asset.address != request.url.path:
            raise HTTPException(404, "there is no such file; reload the page")
        headers = {"Cache-Control": f"public, max-age={_YEAR_S}, immutable", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            packed = {**headers, "Content-Encoding": "gzip"}
            return Response(asset.compressed, headers=packed, media_type=asset.media_type)
        return Response(asset.content, headers=headers, media_type=asset.media_type)

    return Route("/static/{digest}/{name}", serve)


def make_environment(package: str, assets: Mapping[str, Asset]) -> jinja2.Environment:
    """Return the templates of a package, and those of all programs below `web/`, with the macros `web`."""
    loaders = {"web": jinja2.PackageLoader("fedplat.web")}
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PrefixLoader(loaders)]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )

    def address_of(name: str) -> str:
        return assets[name].address

    filters: dict[str, Any] = environment.filters
    filters |= {"count": count, "printable": texts.printable, "size": size}
    values: dict[str, Any] = environment.globals  # typed as if it had the default values only
    values |= {"asset": address_of, "version": __version__, "moment": moment}
    # Not imported by the templates: a block that is rendered alone does not have its template's imports.
    values["web"] = environment.get_template("web/macros.html").module
    return environment


@dataclasses.dataclass(frozen=True)
class Pager:
    """The links of a list: `first` is the number of the first row, `next_address` is empty on the last page."""

    first: int
    last: int
    total: int
    next_address: str
    first_address: str


def moment(unix_s: float) -> Markup | str:
    """Return a point in time as an element in UTC, to which the page's script adds the local time; `-` for 0."""
    if not unix_s:
        return NOTHING
    try:
        when = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):  # NaN, or a year beyond the calendar's range
        return NOTHING
    return Markup('<time datetime="{}">{} UTC</time>').format(
        when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%Y-%m-%d %H:%M:%S")
    )


def size(num_bytes: float) -> str:
    """Return a size in bytes, such as `36.1 KiB`; `-` for 0."""
    return texts.size(num_bytes) if num_bytes else NOTHING


def count(number: float) -> str:
    """Return an integer with thousands separators."""
    return f"{number:,.0f}"
