"""The environment of torchrun, Open MPI's mpirun and Slurm's srun, and the store where ranks meet without torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from fedplat.pytorch.distributed import LaunchedRank, find_rank, join_group, open_store
from support.ports import free_port

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "host0", "MASTER_PORT": "29500"},
}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "829030401"},
}
SRUN = {
    **{"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "77"},
    **{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "3"},
    **{"SLURM_STEP_NODELIST": "gpu[03-04,09],big1", "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)"},
    **{"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
}


def found(environment: Mapping[str, str]) -> LaunchedRank:
    place = find_rank(environment)
    assert place is not None
    return place


def numbers(place: LaunchedRank) -> list[int]:
    return [place.rank, place.size, place.local_rank, place.local_size]


def test_each_launcher_says_where_a_rank_is() -> None:
    assert find_rank({}) is None
    torchrun, mpirun, srun = found(TORCHRUN), found(MPIRUN), found(SRUN)
    assert [torchrun.launcher, mpirun.launcher, srun.launcher] == ["torchrun", "mpirun", "srun"]
    assert [numbers(torchrun), numbers(mpirun), numbers(srun)] == [[5, 8, 1, 4], [1, 2, 1, 2], [3, 7, 0, 2]]
    assert [torchrun.address, mpirun.address, srun.address] == ["host0", "127.0.0.1", "gpu03"]
    assert [torchrun.is_on_one_host, mpirun.is_on_one_host, srun.is_on_one_host] == [False, True, False]
    assert all(20_000 <= place.port < 30_000 for place in (mpirun, srun))


def test_the_innermost_launcher_counts() -> None:
    """torchrun may be started by the others, and mpirun uses srun."""
    assert found(SRUN | MPIRUN | TORCHRUN).launcher == "torchrun"
    assert found(SRUN | MPIRUN).launcher == "mpirun"


def test_a_batch_script_of_slurm_is_not_a_rank() -> None:
    assert find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[03-04]"}) is None


@pytest.mark.parametrize(
    ("nodes", "address"),
    [("gpu7", "127.0.0.1"), ("gpu7,gpu8", "gpu7"), ("a[1-2]-x", "a1-x"), ("rack[010,012]", "rack010")],
)
def test_the_address_of_the_first_rank_under_srun(nodes: str, address: str) -> None:
    place = SRUN | {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": ""}
    assert found(place).address == address
    assert found(place | {"MASTER_ADDR": "mine", "MASTER_PORT": "4000"}).address == "mine"


def test_jobs_have_ports_of_their_own() -> None:
    jobs = [found(SRUN | {"SLURM_JOB_ID": str(job)}).port for job in range(20)]
    assert len(set(jobs)) == 20
    assert found(SRUN | {"MASTER_PORT": "4000"}).port == 4000


def test_wrong_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE = '': expected a whole number"):
        find_rank({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE = 'many': expected the number of ranks"):
        find_rank(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"})
    for nodes in ("1(x99999999999)", "9" * 5000):
        with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE = '.{1,200}': expected the number of ranks"):
            find_rank(SRUN | {"SLURM_STEP_TASKS_PER_NODE": nodes})
    with pytest.raises(ValueError, match=r"WORLD_SIZE = '9{40}': expected a whole number"):
        find_rank(TORCHRUN | {"WORLD_SIZE": "9" * 5000})
    with pytest.raises(ValueError, match="mpirun started this process as rank 2 of 2"):
        find_rank(MPIRUN | {"OMPI_COMM_WORLD_RANK": "2"})
    with pytest.raises(ValueError, match="MASTER_PORT = 70000: expected a port below 65536"):
        find_rank(MPIRUN | {"MASTER_PORT": "70000"})
    with pytest.raises(ValueError, match=r"started ranks on several hosts, and does not name .* set MASTER_ADDR"):
        open_store(found(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}), 1)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "MASTER_PORT": str(port)}
        with pytest.raises(ValueError, match=rf"cannot listen at 127.0.0.1:{port} \(.*\); set MASTER_PORT to a free"):
            open_store(found(first), 1)


def test_mpi_needs_a_pytorch_with_mpi() -> None:
    with (
        pytest.raises(
            ValueError, match='"mpi": this PyTorch was built without MPI; use "auto", which also works under'
        ),
        join_group("mpi"),
    ):
        pass


PROGRAM = """
import json
import psutil
from fedplat.pytorch.distributed import join_group

with join_group("gloo", 60) as ranks:
    told = [int(each) for each in ranks.all_gather(str(ranks.rank).encode())]
    listening = {each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"}
    ranks.barrier()
print(json.dumps([told, sorted(listening)]))
"""


@pytest.mark.slow
def test_ranks_of_srun_on_one_host_meet_where_no_other_host_can() -> None:
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu7"}
    step |= {"MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    replies = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert replies == [[[0, 1], ["127.0.0.1"]]] * 2
