"""Write the public address of the repository into the files that name it.

    python docs/site/project_address.py https://code.example.org/fedplat/fedplat [https://docs.example.org]

These are `[project.urls]` of the three distributions, and CITATION.cff. The second address is that of the
documentation; by default it is the folder `docs` of the repository. A second run replaces what the first one wrote.
Nothing else names an address: the workflows know the repository that they run in, and give it to `make docs` as
DOCS_REPOSITORY.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ("pyproject.toml", "client/pyproject.toml", "server/pyproject.toml")
ADDRESS = re.compile(r"https://[\w.-]+(/[\w./~-]*)?")


def write(root: Path, repository: str, documentation: str) -> None:
    """Write the addresses into the files below `root`. Raises `ValueError` for one that is not an https address."""
    for address in (repository, documentation):
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r} is no address: expected https://HOST/PATH, as a browser shows it")
    repository, documentation = repository.rstrip("/"), documentation.rstrip("/")
    urls = {
        "Documentation": documentation,
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    table = "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    for name in PROJECTS:
        path = root / name
        text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n?", "", path.read_text("utf-8"), flags=re.MULTILINE)
        path.write_text(
            re.sub(r"^\[project\.scripts\]", lambda found: f"{table}\n{found[0]}", text, count=1, flags=re.M)
        )
    citation = root / "CITATION.cff"
    text = re.sub(r"^repository-code: .*\n", "", citation.read_text("utf-8"), flags=re.MULTILINE)
    citation.write_text(f"{text}repository-code: {repository}\n", "utf-8")


def main() -> None:
    """Read the command line."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    repository = sys.argv[1]
    try:
        write(ROOT, repository, sys.argv[2] if len(sys.argv) == 3 else f"{repository.rstrip('/')}/tree/main/docs")
    except ValueError as exc:
        raise SystemExit(f"error: {exc}") from exc


if __name__ == "__main__":
    main()
