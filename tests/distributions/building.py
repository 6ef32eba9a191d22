"""The files of a release: built from the tree without a network, and compared with it."""

from __future__ import annotations

import email.message
import email.parser
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

from uv import find_uv_bin

from support.projects import CONSTRAINTS, CORE, OURS, PROJECTS, ROOT, Project

EXTRAS = {"fedplat": ("cli", "dashboard", "plots", "privacy", "torch")}
"""The extras that the environments have, by distribution."""
ALSO = ("scikit-learn",)
"""What the examples need besides."""
METADATA = ("LICENSE", "README.md", "pyproject.toml")


class DistributionError(Exception):
    """A distribution is not as it must be; the message has the reason."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise DistributionError(reason)


def read_wheelhouse_requirements() -> list[str]:
    """The third-party distributions that the builds and the environments need."""
    backends: list[str] = tomllib.loads(CORE.path.read_text())["build-system"]["requires"]
    found = {*ALSO, *backends}
    for project in PROJECTS:
        extras = [each for extra in EXTRAS.get(project.name, ()) for each in project.extras[extra]]
        found |= {str(each) for each in (*project.dependencies, *extras) if each.name not in OURS}
    return sorted(found)


def make_wheelhouse(folder: Path) -> Path:
    """A folder in `folder` with the pinned third-party wheels: downloaded once, and again when a pin changes."""
    requirements = read_wheelhouse_requirements()
    digest = sha256("\n".join([*requirements, CONSTRAINTS.read_text()]).encode()).hexdigest()
    wheelhouse = folder / f"wheelhouse-{digest[:12]}"
    if not wheelhouse.exists():
        part = wheelhouse.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "-c", str(CONSTRAINTS)]
        subprocess.run([*pip, "--dest", str(part), *requirements], check=True)
        part.rename(wheelhouse)
        for old in set(folder.glob("wheelhouse-*")) - {wheelhouse}:  # of other pins, hundreds of megabytes each
            shutil.rmtree(old)
    return wheelhouse


def build(wheelhouse: Path, output: Path) -> None:
    """Builds three sdists, and three wheels from the sdists; the build backend comes from the wheelhouse."""
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("fedplat*-*"):
        old.unlink()
    command = [find_uv_bin(), "build", "--quiet", "--offline", "--no-config", "--no-index"]
    command += ["--all-packages", "--find-links", str(wheelhouse), "--out-dir", str(output)]
    subprocess.run(command, cwd=ROOT, check=True)


def inspect(output: Path) -> list[Path]:
    """The six files, each of which must have the tree's files and nothing else. Raises `DistributionError`."""
    found: list[Path] = []
    for project in PROJECTS:
        stem = f"{project.package}-{project.version}"
        sdist, wheel = output / f"{stem}.tar.gz", output / f"{stem}-py3-none-any.whl"
        _inspect_sdist(project, sdist)
        _inspect_wheel(project, wheel)
        found += [sdist, wheel]
    strangers = {path.name for path in output.glob("*") if path.suffix in (".gz", ".whl")} - {
        each.name for each in found
    }
    require(not strangers, f"{output} has files of no distribution: {sorted(strangers)}")
    return found


def _list_sources(project: Project) -> set[str]:
    """The files of the package, with the paths that they have in a wheel."""
    files = (path for path in project.sources.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(project.folder).as_posix() for path in files}


def _inspect_sdist(project: Project, path: Path) -> None:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    _compare(path, names - {"PKG-INFO", ".gitignore"}, _list_sources(project) | set(METADATA))


def _inspect_wheel(project: Project, path: Path) -> None:
    info = f"{project.package}-{project.version}.dist-info/"
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.startswith(info)}
        _compare(path, names, _list_sources(project))
        for name in names:
            require(archive.read(name) == (project.folder / name).read_bytes(), f"{path.name}: {name} is another file")
        license_text = archive.read(f"{info}licenses/LICENSE").decode()
        require(license_text == (ROOT / "LICENSE").read_text(), f"{path.name}: the license is another one")
        metadata = email.parser.Parser().parsestr(archive.read(f"{info}METADATA").decode())
        scripts = archive.read(f"{info}entry_points.txt").decode().split()
    _inspect_metadata(project, metadata)
    expected = [word for name, target in project.table["scripts"].items() for word in (name, "=", target)]
    require(scripts == ["[console_scripts]", *expected], f"{path.name}: the commands are {scripts}")


def _inspect_metadata(project: Project, metadata: email.message.Message) -> None:
    expected = {
        "Name": project.name,
        "Version": project.version,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": project.table["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for key, value in expected.items():
        require(metadata[key] == value, f"{project.name}: {key} is {metadata[key]!r}; expected {value!r}")
    require("Typing :: Typed" in (metadata.get_all("Classifier") or []), f"{project.name}: it does not claim its types")
    require(
        str(metadata.get_payload()) == (project.folder / "README.md").read_text(), f"{project.name}: another readme"
    )


def _compare(path: Path, names: set[str], expected: set[str]) -> None:
    require(names >= expected, f"{path.name} lacks {sorted(expected - names)}")
    require(names <= expected, f"{path.name} also has {sorted(names - expected)}")
