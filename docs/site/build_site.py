"""Build the documentation site into build/site: `make docs`.

The sources are plain Markdown, with links that work on a code host. This program copies them to build/docs, with the
README and the changes, and links of those pages to files of the repository become links to pages that show these files.
It adds one page for each module of the API reference. Zensical makes the site of these copies, as mkdocs.yml says.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from markdown_lists import adapt_lists

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = "mkdocs.yml"
COPIES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
DESCRIPTION = (
    "A federated-learning platform in Python: a crash-safe server, a light client SDK, and a simulator that runs the "
    "server's coordinator."
)
MOVED = {"README.md": "start.md", "CHANGELOG.md": "changes.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".proto": "protobuf"}
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
HIDDEN_FROM_SEARCH = "search:\n  exclude: true\n"

PUBLIC_MODULES = (
    "fedplat",
    "fedplat_client",
    "fedplat_client.trainers.torch",
    "fedplat_client.trainers.learner",
    "fedplat_client.trainers.sklearn",
    "fedplat_client.trainers.lightning",
    "fedplat.simulation",
    "fedplat.simulation.data",
    "fedplat.simulation.data.sources",
    "fedplat.simulation.data.partitioners",
    "fedplat.simulation.clients",
    "fedplat.simulation.flower",
    "fedplat.sweep",
    "fedplat.admin",
    "fedplat.job",
    "fedplat.model",
    "fedplat.learner",
    "fedplat.sklearn",
    "fedplat.packed",
    "fedplat.parallel",
    "fedplat.pytorch.packed",
    "fedplat.pytorch.parallel",
    "fedplat.pytorch.training",
    "fedplat.pytorch.server",
    "fedplat.aggregate",
    "fedplat.aggregate.robust",
    "fedplat.codecs",
    "fedplat.gossip",
    "fedplat.procedures",
    "fedplat.tables",
    "fedplat.sampling",
    "fedplat.privacy",
    "fedplat.metrics",
    "fedplat.modes",
    "fedplat.trackers",
    "fedplat.config.plugins",
    "fedplat.testing",
    "fedplat.errors",
)
"""The modules that programs and plugins import."""


def resolve(source: str, target: str) -> str:
    """Return the path in the repository that a link of the file `source` leads to; of a folder, its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() and path != "." else path


def page_of(path: str) -> str:
    """Return the page of the site that shows a file or a folder of the repository."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def rewrite_links(text: str, source: str, on_link: Callable[[str], None]) -> str:
    """Return the Markdown of the file `source` with links between pages of the site, and report each linked path."""
    folder = posixpath.dirname(page_of(source))

    def rewrite(match: re.Match[str]) -> str:
        target, hash_, anchor = match[0].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = resolve(source, target)
        if not (ROOT / path).exists():
            raise SystemExit(f"error: {source} links to {match[0]}, but there is no {path}; correct the link")
        on_link(path)
        return posixpath.relpath(page_of(path), folder or ".") + (hash_ + anchor if path.endswith(".md") else "")

    pieces = CODE.split(text)  # what is code has an odd index
    return "".join(piece if index % 2 else LINK.sub(rewrite, piece) for index, piece in enumerate(pieces))


def show(path: str) -> str:
    """Return a file or a folder of the repository as Markdown, with links relative to its own place."""
    where = ROOT / path
    if path.endswith(".md"):
        return where.read_text("utf-8")
    if where.is_dir():
        kinds = {*LANGUAGES, ".md", ".ipynb"}
        files = sorted(file.relative_to(where).as_posix() for file in where.rglob("*") if file.suffix in kinds)
        rows = [f"- [`{file}`]({posixpath.join(posixpath.basename(path), file)})" for file in files]
        return f"# {path}\n\n" + "\n".join(rows) + "\n"
    if path.endswith(".ipynb"):
        return show_notebook(where)
    text = where.read_text("utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(where.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def show_notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts]
    return "\n\n".join(parts) + "\n"


def copy_pages() -> None:
    """Copy docs/, the README and the changes, then what they link to, and what this links to."""
    shutil.rmtree(COPIES, ignore_errors=True)
    shutil.copytree(DOCS, COPIES, ignore=shutil.ignore_patterns("site", "*.md"))
    pending = [*MOVED, *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]
    seen = set(pending)

    def on_link(path: str) -> None:
        if path not in seen and not (COPIES / page_of(path)).exists():
            seen.add(path)
            pending.append(path)

    for path in pending:  # which grows
        page = COPIES / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        extra = HIDDEN_FROM_SEARCH if page_of(path).startswith("source/") else ""
        text = rewrite_links(show(path), path, on_link)
        page.write_text(f"---\nfile: {path}\n{extra}---\n{adapt_lists(text)}", "utf-8")


def exported(module: str) -> list[str]:
    """Return the names in `__all__` of a module's file, or none if it has no such list."""
    (path,) = [path for path in (ROOT / "client", ROOT) for path in candidates(path, module) if path.is_file()]
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    return []


def candidates(folder: Path, module: str) -> list[Path]:
    """Return where the file of a module may be."""
    path = folder / module.replace(".", "/")
    return [path / "__init__.py", path.with_suffix(".py")]


def write_reference() -> None:
    """Write a page for each public module; mkdocstrings replaces its directive with the module's docstrings."""
    folder = COPIES / "reference"
    folder.mkdir()
    for module in PUBLIC_MODULES:
        names = sorted(exported(module), key=lambda name: name.endswith("Error"))  # errors are last
        members = f"    options:\n      members: {names}\n" if names else ""
        (folder / f"{module}.md").write_text(f"# {module}\n\n::: {module}\n{members}", "utf-8")


def read_navigation() -> dict[str, list[str]]:
    """Return the pages of each section of the navigation, without those that mkdocstrings writes."""
    text = re.sub(r"![!\w/:.]+ ", "", (ROOT / CONFIGURATION).read_text("utf-8"))  # tags call functions
    sections = {name: entries for section in yaml.safe_load(text)["nav"] for name, entries in section.items()}
    found = {name: list(_list_pages(entries)) for name, entries in sections.items()}
    return {name: pages for name, pages in found.items() if pages}


def _list_pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        if not entries.startswith("reference/"):
            yield entries
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from _list_pages(entry)


def write_texts_for_language_models() -> None:
    """Write llms.txt, the pages with their first sentences (llmstxt.org), and llms-full.txt, the text of all pages."""
    address = os.environ.get("DOCS_SITE", "").rstrip("/")
    lines, texts = list[str](), list[str]()
    for section, pages in read_navigation().items():
        lines += ["", f"## {section}", ""]
        for page in pages:
            text = (COPIES / page).read_text("utf-8").split("---\n", 2)[2].strip()
            title, summary = summarize(text)
            folder = page.removesuffix(".md").removesuffix("index")
            lines.append(f"- [{title}]({address}/{folder + '/' if folder else ''}): {summary}")
            texts.append(text)
    head = ["# fedplat", "", f"> {DESCRIPTION}"]
    (SITE / "llms.txt").write_text("\n".join([*head, *lines]) + "\n", "utf-8")
    (SITE / "llms-full.txt").write_text("\n\n".join(texts) + "\n", "utf-8")


def summarize(text: str) -> tuple[str, str]:
    """Return the title of a page, and its first sentence without links."""
    title, _, rest = text.partition("\n")
    paragraphs = [each for each in rest.split("\n\n") if re.match(r"\s*[A-Za-z]", each)]
    words = " ".join(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", paragraphs[0]).split()) if paragraphs else ""
    return title.lstrip("# ").replace("`", ""), re.split(r"(?<=[.:]) ", words)[0].rstrip(":")


def main() -> None:
    """Build the site; any warning is an error.

    With DOCS_REPOSITORY, the address of the repository, pages link to their files there. With DOCS_SITE, the address of
    the site, the links of llms.txt are absolute.
    """
    copy_pages()
    write_reference()
    zensical = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", CONFIGURATION]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}  # for doctests.py
    if status := subprocess.run(zensical, cwd=ROOT, env=environment, check=False).returncode:
        raise SystemExit(status)
    write_texts_for_language_models()


if __name__ == "__main__":
    main()
