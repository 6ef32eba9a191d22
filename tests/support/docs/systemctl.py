"""What the commands of docs/runbook.md need of systemd: `python systemctl.py FOLDER systemctl|journalctl WORDS ...`.

It starts what a unit's `ExecStart=` names, with the unit's environment, credentials and folders, and stops it by its
signal. FOLDER stands for `/`. Users, limits and sandboxes of a unit are not applied; `systemd-analyze verify` reads
them.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

PATIENCE_S = 60.0


class Unit:
    """A unit by its name: `name@instance` reads the template `name@.service`."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name if "." in name else f"{name}.service"
        template, instance = re.sub(r"@[^.]*", "@", self.name), re.findall(r"@([^.]*)\.", self.name)
        text = (root / "etc/systemd/system" / template).read_text()
        text = text.replace("%i", instance[0] if instance else "")
        self.keys = [(key, value) for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)]
        self.log = root / "run" / f"{self.name}.log"
        self.pid_file = root / "run" / f"{self.name}.pid"
        self.log.parent.mkdir(exist_ok=True)

    def values(self, key: str) -> list[str]:
        return [value for found, value in self.keys if found == key]

    def environment(self) -> dict[str, str]:
        """Returns the variables of the unit alone, as a service has none of the caller."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "COVERAGE_FILE") if name in os.environ}
        pairs = [pair for line in self.values("Environment") for pair in shlex.split(line)]
        for name in self.values("EnvironmentFile"):
            path = Path(name.removeprefix("-"))
            if path.exists() or not name.startswith("-"):
                pairs += shlex.split(path.read_text(), comments=True)
        for folder in self.values("StateDirectory"):
            path = self.root / "var/lib" / folder
            path.mkdir(0o700, parents=True, exist_ok=True)
            pairs.append(f"STATE_DIRECTORY={path}")
        for credential in self.values("LoadCredential"):
            name, _, source = credential.partition(":")
            target = self.root / "run" / self.name
            target.mkdir(exist_ok=True)
            (target / name).write_bytes(Path(source).read_bytes())
            pairs.append(f"CREDENTIALS_DIRECTORY={target}")
        return {**kept, **dict(pair.split("=", 1) for pair in pairs)}

    def start(self) -> int:
        if self.is_running():
            return 0
        (line,) = self.values("ExecStart") or [""]
        if not line:
            return 0  # a timer
        environment = self.environment()
        words: list[str] = []
        for word in shlex.split(line):
            whole = re.fullmatch(r"\$(\w+)", word)  # only such a word is split
            words += environment[whole[1]].split() if whole else [self._fill(word, environment)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                words,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self.values("Type") == ["oneshot"]:
            return process.wait(PATIENCE_S)
        self.pid_file.write_text(str(process.pid))
        return 0

    @staticmethod
    def _fill(word: str, environment: dict[str, str]) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word)

    def is_running(self) -> bool:
        """Returns whether its process is there: one that ended may wait as a zombie for the host to note it."""
        if not self.pid_file.exists():
            return False
        try:
            state = Path(f"/proc/{self.pid_file.read_text()}/stat").read_text()
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] != "Z"

    def stop(self) -> int:
        if self.is_running():
            os.kill(int(self.pid_file.read_text()), signal.SIGTERM)
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / 0.05)):
            if not self.is_running():
                return 0
            pause.wait(0.05)
        return 1


def main(root: Path, program: str, words: list[str]) -> int:
    """Runs one command; returns its exit status."""
    if program == "journalctl":
        if "--unit" in words:
            sys.stdout.write(Unit(root, words[words.index("--unit") + 1]).log.read_text())
        return 0
    verb, *names = [word for word in words if word != "--now"]
    units = [Unit(root, name) for name in names]
    match verb:
        case "daemon-reload" | "list-timers":
            statuses = [0]
        case "start" | "enable":
            statuses = [unit.start() for unit in units]
        case "stop" | "disable":
            statuses = [unit.stop() for unit in units]
        case "restart":
            statuses = [unit.stop() or unit.start() for unit in units]
        case "status":
            statuses = [0 if unit.is_running() else 3 for unit in units]
        case _:
            raise SystemExit(f"docs/runbook.md has systemctl {verb}, which its test does not know")
    return max(statuses)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
