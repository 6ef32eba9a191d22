"""The processes of a benchmark end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

BENCHMARK = """
import signal, sys
from pathlib import Path
from processes import Processes

with Processes(Path(sys.argv[1]), {}) as processes:
    print(processes.start("waiting", [sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
    while True:
        signal.pause()
"""


def test_they_end_if_the_benchmark_is_ended(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert psutil.pid_exists(pid)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(pid)
