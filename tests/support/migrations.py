"""Migrations that a test adds to those of this version, as a later release would."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Generator
from pathlib import Path

import pytest
from alembic.config import Config
from sqlalchemy import Connection

from fedplat_server.database import schema

_VERSIONS = Path(schema.__file__).parent / "migrations" / "versions"

EXPANDS = """
op.create_table("futures", sa.Column("future_id", sa.String(), primary_key=True))
op.add_column("jobs", sa.Column("future", sa.String()))
op.add_column("attempts", sa.Column("future", sa.Integer(), nullable=False, server_default="7"))
op.add_column("assignments", sa.Column("future", sa.JSON()))
op.add_column("clients", sa.Column("future", sa.String(), nullable=False, server_default="none"))
op.add_column("history", sa.Column("future", sa.String()))
op.add_column("model_versions", sa.Column("future", sa.String()))
op.add_column("leases", sa.Column("future", sa.String()))
op.create_index("ix_assignments_future", "assignments", ["job_id", "base_version"])
"""
"""A step that adds something to every table that a round writes to."""


def following(revision: str, steps: int = 1) -> str:
    """The revision that comes so many steps after another."""
    return f"{int(revision) + steps:04d}"


def write_step(folder: Path, body: str, after: str | None = None, compatible_from: str | None = None) -> str:
    """Write a step into a folder; its revision. By default it follows the head, and is compatible like it."""
    after = after or schema.head()
    revision = following(after)
    states = compatible_from if compatible_from is not None else schema.read_compatible_from(after)
    lines = [
        "import sqlalchemy as sa",
        "from alembic import op",
        f"revision = {revision!r}",
        f"down_revision = {after!r}",
        *([f"compatible_from = {states!r}"] if states else []),
        "def upgrade() -> None:",
        textwrap.indent(body.strip() or "pass", "    "),
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"{revision}_future.py").write_text("\n".join(lines) + "\n")
    return revision


def add_versions(folder: Path) -> None:
    """Make `schema` use the steps of a folder as well, in this process."""
    original = schema.config

    def config(connection: Connection | None = None) -> Config:
        result = original(connection)
        result.set_main_option("path_separator", "os")
        result.set_main_option("version_locations", f"{_VERSIONS}{os.pathsep}{folder}")
        return result

    schema.config = config
    schema.head.cache_clear()


@contextlib.contextmanager
def added(folder: Path) -> Generator[None]:
    """Let this process use the steps of a folder as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "config", schema.config)  # remembers it
        add_versions(folder)
        yield
    schema.head.cache_clear()
