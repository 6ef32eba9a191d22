"""What the programs ask of the C library's allocator."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, pathlib
from fedplat.wire import process_tuning

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

process_tuning.reuse_message_memory()
before = resident()
message = b"x" * (8 << 20)
del message
kept = resident() - before
model = b"x" * (64 << 20)
del model
print(kept >> 20, (resident() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc has it")
def test_the_memory_of_messages_is_kept_and_that_of_models_is_not() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={})
    kept, after_a_model = map(int, ran.stdout.split())
    assert kept >= 7
    assert after_a_model < 32
