"""A Slurm of one node on this machine: munge, the controller and the node's daemon, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from support import process_logs
from support.polling import until
from support.ports import free_port

_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={munge_socket}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=1
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/node
StateSaveLocation={folder}/controller
SchedulerType=sched/backfill
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PropagateResourceLimits=NONE
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _find(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install --no-install-recommends slurm-wlm munge")
    return path


@contextlib.contextmanager
def cluster(folder: Path) -> Generator[Path]:
    """Yield the configuration of a cluster whose node is idle; skip the test without Slurm, or without root."""
    programs = {name: _find(name) for name in (*_DAEMONS, "sbatch")}
    if os.getuid() != 0:
        pytest.skip("the daemons of Slurm run as root only")
    folder.chmod(0o700)
    for name in ("node", "controller"):
        (folder / name).mkdir()
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    ports = {"controller": free_port(), "node": free_port()}
    short = Path(tempfile.mkdtemp(prefix="munge-"))  # the name of a socket has at most 108 bytes
    munge_socket = short / "socket"
    configuration.write_text(
        _CONFIGURATION.format(host=socket.gethostname(), folder=folder, munge_socket=munge_socket, **ports)
    )
    places = [f"--socket={munge_socket}", f"--pid-file={folder}/munge.pid"]
    places += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", f"--key-file={key}"]
    commands = {"munged": ["--force", "--foreground", *places], "slurmctld": ["-D"], "slurmd": ["-D"]}
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name, options in commands.items():
            with process_logs.open_log(folder / f"{name}.out") as log:
                running.append(
                    subprocess.Popen(
                        [programs[name], *options], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
            if name == "munged":
                until(munge_socket.exists, "munged")
        show = ["sinfo", "--noheader", "--format=%T"]
        until(
            lambda: subprocess.run(show, env=environment, capture_output=True, text=True).stdout.strip() == "idle",
            "the node",
        )
        yield configuration
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
        shutil.rmtree(short)
