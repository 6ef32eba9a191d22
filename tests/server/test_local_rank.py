"""The rank that the daemon starts itself."""

from __future__ import annotations

from fedplat.pytorch.distributed import find_rank
from fedplat_server.workers.client import make_environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
SRUN = {
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
    **{"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1"},
}


def test_a_rank_of_a_daemon_that_a_launcher_started_is_alone() -> None:
    for launched in (TORCHRUN, MPIRUN, SRUN, TORCHRUN | MPIRUN | SRUN):
        assert find_rank(launched) is not None
        assert find_rank(make_environment(launched)) is None


def test_a_rank_has_the_other_variables_of_the_daemon() -> None:
    environment = make_environment({"PATH": "/bin", "OMP_NUM_THREADS": "3", "SLURM_JOB_ID": "7"})
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["SLURM_JOB_ID"] == "7"
