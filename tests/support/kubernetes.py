"""What a cluster does with a pod: it checks the Pod Security Standard "restricted", and starts the containers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support import process_logs, processes

Json = Any
VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}


def containers(pod: Json) -> Iterator[Json]:
    """Yield all containers of a pod's specification, in the order of their start."""
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def violations(pod: Json) -> list[str]:
    """Return what the Pod Security Standard "restricted" of Kubernetes 1.37 forbids in a pod's specification."""
    common = pod.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    found += [f"volume {volume['name']}" for volume in pod["volumes"] if not VOLUMES & volume.keys()]
    found += [name for name in ("sysctls", "seLinuxOptions", "windowsOptions", "appArmorProfile") if name in common]
    for container in containers(pod):
        own = container.get("securityContext", {})
        merged = {**common, **own}
        rules = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "procMount": "procMount" not in own,
            "runAsNonRoot": merged.get("runAsNonRoot") is True,
            "runAsUser": merged.get("runAsUser") != 0,
            "seccompProfile": merged.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "hostPort": not any("hostPort" in port for port in container.get("ports", ())),
        }
        found += [f"{container['name']}: {rule}" for rule, is_kept in rules.items() if not is_kept]
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) in a command, an argument or a variable, as the kubelet does."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", value, text)


class Pod:
    """The containers of a pod as processes of this machine, with folders instead of volumes, and other ports.

    `volumes` are the folders of the pod's volumes, by name. Logs and the home are in `folder`.
    """

    def __init__(self, stateful_set: Json, index: int, volumes: Mapping[str, Path], folder: Path) -> None:
        self.spec = stateful_set["spec"]["template"]["spec"]
        self.name = f"{stateful_set['metadata']['name']}-{index}"
        self.folder = folder
        self._volumes = volumes
        ports = [port["containerPort"] for port in self.spec["containers"][0]["ports"]]
        self.ports = {number: processes.free_port() for number in ports}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    @property
    def log(self) -> str:
        """What the server has logged."""
        return (self.folder / "server.log").read_text()

    def path(self, path: str) -> Path:
        """Return the place on this machine of a path in the server's container."""
        return Path(self._local(self.spec["containers"][0], path))

    def _local(self, container: Json, text: str) -> str:
        folders = {mount["mountPath"]: str(self._volumes[mount["name"]]) for mount in container["volumeMounts"]}
        text = re.sub(rf"(?<![\w/])({'|'.join(folders)})(?![\w-])", lambda match: folders[match[1]], text)
        for number, port in self.ports.items():
            text = re.sub(rf"0\.0\.0\.0:{number}\b", f"127.0.0.1:{port}", text)
        return text

    def environment(self, container: Json) -> dict[str, str]:
        """Return the variables of a container; the daemons' own names lead to this machine."""
        fields = {"metadata.name": self.name}
        found = {"PATH": f"{processes.BIN}:{os.environ['PATH']}", "HOME": str(self.folder)}
        for variable in container["env"]:
            text = variable["value"] if "value" in variable else fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            found[variable["name"]] = self._local(container, expand(text, found))
        if "FEDPLAT_ADVERTISE" in found:
            assert found["FEDPLAT_ADVERTISE"].startswith(f"{self.name}."), found["FEDPLAT_ADVERTISE"]
            found["FEDPLAT_ADVERTISE"] = f"127.0.0.1:{self.ports[7443]}"
        return found

    def command(self, container: Json) -> list[str]:
        """Return the command line of a container."""
        variables = self.environment(container)
        words = [*container["command"], *container.get("args", ())]
        return [self._local(container, expand(word, variables)) for word in words]

    def start_init(self) -> Iterator[subprocess.Popen[str]]:
        """Start the init containers; the caller waits for each before the next."""
        for container in self.spec["initContainers"]:
            yield subprocess.Popen(
                self.command(container),
                env=self.environment(container),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def initialize(self) -> str:
        """Run the init containers; return their output."""
        output = ""
        for process in self.start_init():
            output += process.communicate(timeout=processes.PATIENCE_S)[0]
            assert process.returncode == 0, output
        return output

    def start(self) -> None:
        """Start the server's container."""
        container = self.spec["containers"][0]
        with process_logs.open_log(self.folder / "server.log") as log:
            self._process = subprocess.Popen(
                self.command(container), env=self.environment(container), stdout=log, stderr=log
            )

    def execute(self, *command: str) -> str:
        """Run a command in the server's container, as `kubectl exec` does; return its standard output."""
        variables = self.environment(self.spec["containers"][0])
        return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout

    def is_running(self) -> bool:
        """Return whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> int:
        """Stop the server as the kubelet does; return its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        return self._process.wait(processes.PATIENCE_S)
