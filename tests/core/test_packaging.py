"""Three distributions of one version; only the three packages are importable; the stubs are those of proto/."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from support.projects import CLIENT, CONSTRAINTS, CORE, OURS, PROJECTS, PYTHONS, ROOT, SERVER, Project

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
each_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)


def test_versions_are_equal() -> None:
    import fedplat
    import fedplat_client
    import fedplat_server

    versions = {project.version for project in PROJECTS}
    versions |= {fedplat.__version__, fedplat_client.__version__, fedplat_server.__version__}
    assert len(versions) == 1
    version = versions.pop()
    for project in PROJECTS[1:]:
        assert {str(each.specifier) for each in project.requirements if each.name == "fedplat"} == {f"=={version}"}
    parsed = Version(version)
    assert f"Version {parsed.major}.{parsed.minor} speaks" in (ROOT / "README.md").read_text()
    heading = "Unreleased" if parsed.is_devrelease else version
    assert re.search(rf"^## \[{re.escape(heading)}\]", CHANGELOG, re.MULTILINE)


def test_an_extra_has_one_meaning() -> None:
    """An extra of a client or a server is that of the core, but for those that only a server can have."""
    own = {"pool", "postgres", "s3"}
    for project in PROJECTS[1:]:
        for name, requirements in project.extras.items():
            if name not in own:
                assert name in CORE.extras
                assert [*map(str, requirements)] == [f"fedplat[{name}]=={CORE.version}"]
    assert [*map(str, SERVER.extras["pool"])] == ["fedplat-server[torch]"]


MENDED = {
    "h11": "0.16",  # CVE-2025-43859: chunked bodies
    "jinja2": "3.1.6",  # CVE-2025-27516
    "pillow": "11.3",  # CVE-2025-48379
    "protobuf": "6.31.1",  # CVE-2025-4565: recursion
    "starlette": "1.3.1",  # CVE-2026-48710: `Host` changes the path; CVE-2026-54283
}
"""The first versions without the known holes of those before."""


@each_project
def test_no_bound_admits_a_version_with_a_known_hole(project: Project) -> None:
    found = [*project.requirements, *(each for extra in project.extras.values() for each in extra)]
    for each in found:
        if (mended := MENDED.get(each.name.lower())) is not None:
            lowest = min(Version(bound.version) for bound in each.specifier if bound.operator == ">=")
            assert lowest >= Version(mended), str(each)


def test_only_flower_holds_versions_back() -> None:
    """The product runs with the current versions of its dependencies; an app of Flower needs an environment of its own.

    Stubs run with protobuf of their own major version and the next one.
    """
    stubs = {path.read_text() for path in (ROOT / "fedplat" / "wire" / "v1").glob("*_pb2.py")}
    generated = {found[1] for text in stubs if (found := re.search(r"^# Protobuf Python Version: (.+)$", text, re.M))}
    (version,) = map(Version, generated)
    capped = {
        each.name: str(each.specifier)
        for project in PROJECTS
        for extra, requirements in {"": project.dependencies, **project.extras}.items()
        for each in requirements
        if any(bound.operator not in (">=", "!=") for bound in each.specifier) and each.name not in OURS
        if extra not in ("dev", "docs", "flower")
    }
    assert capped == {"protobuf": f"<{version.major + 2},>={version}", "transformers": "<6,>=5.17"}


def test_the_conda_recipe_requires_the_same() -> None:
    """Nothing here can build it, so it must at least follow the distributions."""
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == CORE.version
    for project, output in zip((CORE, CLIENT), recipe["outputs"], strict=True):
        assert output["package"]["name"] == project.name
        python, *run = (each for each in output["requirements"]["run"] if "pin_subpackage" not in each)
        assert python == f"python {project.table['requires-python']}"
        expected = [each for each in project.dependencies if each.name not in OURS]
        assert {str(Requirement(each)) for each in run} == {*map(str, expected)}
        scripts = [f"{name} = {target}" for name, target in project.table["scripts"].items()]
        assert output["build"]["python"]["entry_points"] == scripts


@each_project
def test_a_distribution_describes_itself(project: Project) -> None:
    readme = (project.folder / project.table["readme"]).read_text()
    assert readme.startswith(f"# {project.name}\n")
    assert project.table["description"]
    assert project.table["keywords"] == sorted(project.table["keywords"])
    assert "Typing :: Typed" in project.table["classifiers"]
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in project.table["classifiers"]]
    assert tuple(each[1] for each in found if each) == PYTHONS
    assert project.table["requires-python"] == f">={PYTHONS[0]}"
    assert (project.sources / "py.typed").read_bytes() == b""


@each_project
def test_a_readme_lists_every_extra(project: Project) -> None:
    """Those of the core are in the table of docs/install.md, with the others."""
    pages = [ROOT / "docs" / "install.md", *([] if project is CORE else [project.folder / "README.md"])]
    for page in pages:
        rows = "".join(line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("|"))
        assert set(project.extras) - {"dev", "docs"} <= set(re.findall(r"`(\w+)`", rows)), page


@pytest.mark.parametrize("name", ["server", "client", "proto", "docker", "tests", "examples"])
def test_folders_are_not_importable(name: str) -> None:
    """Ours are not: another distribution may well have installed a package `examples`."""
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    found = subprocess.run([sys.executable, "-I", "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert str(ROOT / name) not in found.stdout


def test_every_dependency_is_pinned() -> None:
    lines = CONSTRAINTS.read_text().splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    named = {each.name.lower().replace("_", "-") for project in PROJECTS for each in project.requirements}
    assert named - OURS <= pinned


def test_installed_versions_are_the_pinned_ones() -> None:
    """Else the tests would prove something about other versions than the documented ones."""
    from importlib import metadata

    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            try:
                installed = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                continue  # a pin for an optional part that is not installed here
            assert requirement.specifier.contains(installed, prereleases=True), f"{requirement.name} {installed}"


def test_stubs_are_those_of_the_protocol(tmp_path: Path) -> None:
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *plugins, *outputs]
    subprocess.run([*command, *map(str, protos)], check=True, capture_output=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(generated) == 4 * len(protos)
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is out of date: make proto"


def test_the_packages_are_found() -> None:
    for name in ("fedplat", "fedplat_server", "fedplat_client"):
        assert util.find_spec(name) is not None


@each_project
def test_every_distribution_has_the_license(project: Project) -> None:
    assert project.table["license"] == "Apache-2.0"
    assert project.table["license-files"] == ["LICENSE"]
    assert (project.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
