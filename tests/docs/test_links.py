"""The links of all pages lead somewhere, and the navigation has every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml
from pymdownx.slugs import slugify

import fedplat
from support.docs.blocks import ROOT, pages, replace_code

PAGES = [*pages(), "AGENTS.md", "CHANGELOG.md", "SECURITY.md"]
LINK = re.compile(r"\]\(([^)]+)\)")
SLUG = slugify(case="lower")


def links_of(name: str) -> list[str]:
    return LINK.findall(replace_code((ROOT / name).read_text("utf-8")))


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs.yml and code hosts make them."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {SLUG(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading), "-") for heading in headings}


def configuration() -> dict[str, Any]:
    """Reads mkdocs.yml without its tags, which call functions."""
    return yaml.safe_load(re.sub(r"![!\w/:.]+ ", "", (ROOT / "mkdocs.yml").read_text("utf-8")))


def paths_of(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [path for each in (entry.values() if isinstance(entry, dict) else entry) for path in paths_of(each)]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in links_of(name):
        if re.match(r"[a-z]+:", target):
            address = urlparse(target)
            assert address.scheme in ("http", "https"), f"{name} links to {target}"
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", address.netloc), f"{name} links to {target}"
            continue
        path, _, anchor = target.partition("#")
        linked = ROOT / Path(name).parent / path if path else ROOT / name
        assert linked.exists(), f"{name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors_of(linked), f"{name} links to {target}, but that page has no such heading"


def test_the_navigation_has_every_page() -> None:
    named = paths_of(configuration()["nav"])
    assert len(named) == len(set(named)), "mkdocs.yml, nav: a page is named twice"
    docs = ROOT / "docs"
    missing = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - set(named)
    assert not missing, (
        f"add these pages to `nav` in mkdocs.yml, below the readers that they are for: {sorted(missing)}"
    )


def test_every_page_is_on_the_index() -> None:
    docs = ROOT / "docs"
    index, names = (docs / "index.md").read_text(), [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    missing = [name for name in names if f"]({name}" not in index]
    assert missing == ["index.md"], f"add these pages to docs/index.md: {sorted({*missing} - {'index.md'})}"


def test_the_gallery_has_every_example() -> None:
    gallery = (ROOT / "docs/gallery.md").read_text()
    examples = [path.name for path in (ROOT / "examples").iterdir()]
    assert not [name for name in examples if f"](../examples/{name}" not in gallery]


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fedplat.__version__


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_forms_of_issues_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert all(field["attributes"].get("label") or field["type"] == "markdown" for field in form["body"])
        assert {"name", "description"} <= set(form)


def test_commands_of_agents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"`make ([\w-]+)`", (ROOT / "AGENTS.md").read_text())
    assert named
    assert not [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
