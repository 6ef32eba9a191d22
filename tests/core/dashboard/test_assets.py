"""The files of the pages: small, unchanged since they were vendored, with their licences."""

from __future__ import annotations

import gzip
import hashlib
import json
from importlib import resources

from fedplat.dashboard.rendering import ASSETS, STATIC_FOLDER
from fedplat.web import rendering
from support.dashboard.visitor import Visitor

LOCK = json.loads(STATIC_FOLDER.joinpath("vendor.lock.json").read_text())


def test_vendored_files_are_those_that_were_locked() -> None:
    vendor = STATIC_FOLDER.joinpath("vendor")
    locked = {name: digest for package in LOCK.values() for name, digest in package["files"].items()}
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in vendor.iterdir()} == locked


def test_each_package_has_its_version_its_source_and_its_licence() -> None:
    for package in LOCK.values():
        assert package.keys() == {"version", "source", "licence", "files"}
        assert any(name.endswith(".LICENSE") for name in package["files"])


def test_the_files_are_small() -> None:
    contents: list[bytes] = []
    for each in (STATIC_FOLDER, rendering.STATIC_FOLDER):
        with resources.as_file(each) as folder:
            contents += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert contents
    assert sum(map(len, contents)) <= 150_000
    assert sum(len(asset.compressed) for asset in ASSETS.values()) <= 50_000


async def test_they_are_served_compressed_and_kept_for_a_year(stranger: Visitor) -> None:
    for asset in ASSETS.values():
        plain = await stranger.get(asset.address, {"Accept-Encoding": "identity"})
        assert plain.content == asset.content == gzip.decompress(asset.compressed)
        assert plain.headers["content-type"] == asset.media_type
        assert plain.headers["cache-control"] == "public, max-age=31536000, immutable"
        packed = await stranger.get(asset.address, {"Accept-Encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == asset.content


async def test_an_old_address_is_not_found(stranger: Visitor) -> None:
    assert (await stranger.get("/static/000000000000/dashboard.js")).status_code == 404
    assert (await stranger.get("/static/000000000000/../../app.py")).status_code in (303, 404)
