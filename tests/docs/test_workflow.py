""".github/workflows/docs.yml publishes what `make docs` builds; all workflows pin their actions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.docs.blocks import ROOT
from support.projects import PYTHONS

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def test_the_site_is_built_for_changes_and_published_from_the_main_branch() -> None:
    events = WORKFLOW[True]  # YAML 1.1 reads the key `on` as a boolean
    assert set(events) == {"pull_request", "push", "workflow_dispatch"}
    assert events["push"] == {"branches": ["main"]}
    assert set(JOBS) == {"build", "publish"}
    assert JOBS["publish"]["needs"] == "build"
    assert JOBS["publish"]["if"] == "github.event_name != 'pull_request'"


def test_only_the_job_that_publishes_may_write() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOBS["build"]
    assert JOBS["publish"]["permissions"] == {"pages": "write", "id-token": "write"}


def test_the_artifact_is_what_make_docs_builds() -> None:
    steps = JOBS["build"]["steps"]
    (build,) = [step for step in steps if "docs/site/build_site.py" in step.get("run", "")]
    assert re.search(
        r"^docs:.*\n\t\$\(BIN\)/python docs/site/build_site.py$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    (upload,) = [step for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "build/site"
    assert build["env"] == {"DOCS_REPOSITORY": "${{ github.server_url }}/${{ github.repository }}"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_every_workflow_pins_its_actions_and_gives_few_permissions(path: Path) -> None:
    """The owner of an action could move its tag to other code, which has the permissions of the job."""
    text = path.read_text()
    workflow: dict[Any, Any] = yaml.safe_load(text)
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    called = [job["uses"] for job in workflow["jobs"].values() if "uses" in job]
    called = [each for each in called if not each.startswith("./.github/workflows/")]
    assert not any({"container", "services"} & job.keys() for job in workflow["jobs"].values())  # images by their tags
    for action in (*called, *(step["uses"] for step in steps if "uses" in step)):
        assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+$", text, re.MULTILINE), action
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    if "pull_request" in workflow[True]:
        for job in workflow["jobs"].values():
            may_write = "write" in job.get("permissions", workflow["permissions"]).values()
            assert not may_write or job["if"] in ("github.event_name != 'pull_request'", "github.ref_type == 'tag'")
    assert "EXTRA_INDEX" not in text  # pip takes the highest version of a name from any index
    assert "--extra-index" not in text


@pytest.mark.parametrize("folder", ["docs", "docker", ".github", "README.md", "Makefile"])
def test_packages_come_from_one_index_at_a_time(folder: str) -> None:
    """With two, pip takes the highest version of a name from either: the owner of one can replace packages."""
    files = [ROOT / folder] if (ROOT / folder).is_file() else list((ROOT / folder).rglob("*"))
    texts = [each for each in files if each.suffix in (".md", ".yml", ".sh", "") or "Dockerfile" in each.name]
    for file in (each for each in texts if each.is_file()):
        assert "--extra-index-url" not in file.read_text(encoding="utf-8", errors="replace"), file


def test_changes_are_tested_with_every_python_on_every_system() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    rows = workflow["jobs"]["pythons"]["strategy"]["matrix"]["include"]
    plain = {(row["system"].partition("-")[0], row["python"]) for row in rows if not row["options"]}
    assert plain >= {*(("ubuntu", python) for python in PYTHONS), ("macos", "3.12"), ("windows", "3.12")}
    assert {row["python"] for row in rows if row["options"] == "--lowest"} == {PYTHONS[0]}
