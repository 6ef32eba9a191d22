""".github/workflows/docs.yml publishes what `make docs` builds."""

from __future__ import annotations

import re
from typing import Any

import yaml

from support.docs.blocks import ROOT

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


def test_actions_have_a_version() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)
