"""No secret is an argument of a process: neither in what the docs say, nor in what the examples and tools do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = {
    "a password in --database": re.compile(r"--database[ =]\S*://[^\s/:@]+:[^\s@]+@"),
    "a ticket as an argument": re.compile(r"--ticket(?!-file)[ =\"']"),
    "a token as an argument": re.compile(r"--token\b"),
    # `-e NAME` alone takes the value from the environment; a file (`@...`, `..._FILE`) is no secret itself.
    "a secret in an argument of docker or podman": re.compile(
        r"(?:-e|--env)[ =]['\"]?(?:FEDPLAT_(?:TICKET|TOKEN)|PGPASSWORD)=|(?:-e|--env)[ =]['\"]?FEDPLAT_DATABASE=(?!@)"
    ),
    "a secret written out with echo or printf": re.compile(r"(?:echo|printf)[^\n|]*\bfedplat_op_\w{10}"),
}


def texts() -> list[Path]:
    """Docs, docker files, examples, benchmarks, help texts and the Makefile."""
    folders = ("docs", "docker", "examples", "benchmarks", "fedplat", "server", "client")
    endings = {".md", ".py", ".toml", ".yaml", ".yml", ".sh", ".service", ".server", ".client"}
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    # The options themselves are declared there.
    declared = {ROOT / "client" / "fedplat_client" / "cli.py"}
    return sorted({ROOT / "README.md", ROOT / "Makefile", *found} - declared)


def mistakes(text: str) -> list[str]:
    text = re.sub(r"\\\n\s*", " ", text)
    return [f"{what}: {match[0]}" for what, pattern in WRONG.items() for match in pattern.finditer(text)]


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_secret_becomes_an_argument(path: Path) -> None:
    assert mistakes(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "fedplat-server run --database postgresql://user:password@db/fedplat",
        "fedplat-server run \\\n  --database=postgresql://user:password@db/fedplat",
        "fedplat-client run --ticket fpt1.abc",
        'docker run -e FEDPLAT_TICKET="$TICKET" line-client:1',
        "docker run -e FEDPLAT_DATABASE=postgresql://user:password@host/name",
        "fedplat --token abc status",
    ],
)
def test_a_mistake_would_be_found(line: str) -> None:
    assert len(mistakes(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "fedplat-server run --database postgresql://user@db/fedplat",
        "fedplat-server run --database @/etc/fedplat/database",
        "fedplat-client run --ticket-file ticket",
        "docker run -e FEDPLAT_TICKET line-client:1",
        "docker run -e FEDPLAT_DATABASE=@/run/secrets/database",
    ],
)
def test_what_is_right_passes(line: str) -> None:
    assert mistakes(line) == []
