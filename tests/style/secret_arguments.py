"""No secret is an argument of a process: neither in what the docs say, nor in what the examples and tools do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from style.sources import Finding, Sources

WRONG = {
    "a password in --database": re.compile(r"--database[ =]\S*://[^\s/:@]+:[^\s@]+@"),
    "a ticket as an argument": re.compile(r"--ticket(?!-file| TICKET`)[ =\"']"),
    "a token as an argument": re.compile(r"--token\b"),
    # `-e NAME` alone takes the value from the environment; a file (`@...`, `..._FILE`) is no secret itself.
    "a secret in an argument of docker or podman": re.compile(
        r"(?:-e|--env)[ =]['\"]?(?:FEDPLAT_(?:TICKET|TOKEN)|PGPASSWORD)=|(?:-e|--env)[ =]['\"]?FEDPLAT_DATABASE=(?!@)"
    ),
    "a secret written out with echo or printf": re.compile(r"(?:echo|printf)[^\n|]*\bfedplat_op_\w{10}"),
}


FOLDERS = ("docs", "docker", "examples", "benchmarks", "fedplat", "server", "client")
KINDS = (".md", ".py", ".toml", ".yaml", ".yml", ".sh", ".service", ".server", ".client")
DECLARED = ("client/fedplat_client/command_options.py", "client/fedplat_client/commands.py")
"""The options themselves are declared there, and a warning of them."""


def check(sources: Sources) -> Iterator[Finding]:
    """Search docs, docker files, examples, benchmarks, help texts and the Makefile."""
    for source in sources:
        is_read = source.is_in(*FOLDERS) and source.path.endswith(KINDS) and source.path not in DECLARED
        if is_read or source.path in ("README.md", "Makefile"):
            for line, message in mistakes(source.text):
                yield Finding(source.path, line, message)


def mistakes(text: str) -> list[tuple[int, str]]:
    """Find secrets in a text, whose commands may have several lines."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        (line_of(text, match.start()), f"{what}: {match[0]}")
        for what, pattern in WRONG.items()
        for match in pattern.finditer(joined)
    ]


def line_of(text: str, position: int) -> int:
    """Return the line of a text that has a character, which is counted after the lines of commands are joined."""
    line = 1
    for index, part in enumerate(re.split(r"(\\\n\s*)", text)):
        length = 1 if index % 2 else len(part)
        if position < length:
            return line + part[:position].count("\n")
        position -= length
        line += part.count("\n")
    return line
