"""A process with calls in flight may fork: simulations, DataLoaders and process pools do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import {module}
import asyncio, os, threading
import grpc, grpc.aio

ready, ports = threading.Event(), []

async def serve():
    async def echo(request, context):
        await asyncio.sleep(0.001)
        return request

    server = grpc.aio.server()
    methods = dict(Echo=grpc.unary_unary_rpc_method_handler(echo))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Service", methods)])
    ports.append(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    ready.set()
    await server.wait_for_termination()

def call():
    channel = grpc.insecure_channel("127.0.0.1:%d" % ports[0], options=[("grpc.use_local_subchannel_pool", 1)])
    echo = channel.unary_unary("/Service/Echo")
    while True:
        echo(b"x", wait_for_ready=True)
        answered.release()

threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
ready.wait()
answered = threading.Semaphore(0)
for _ in range(8):
    threading.Thread(target=call, daemon=True).start()
children = []
for _ in range(30):
    for _ in range(20):
        answered.acquire()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    os.close(read)
    children.append((pid, write))
for _ in range(200):
    answered.acquire()
for _, write in children:
    os.close(write)
print(sum(os.waitpid(pid, 0)[1] != 0 for pid, _ in children), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("module", ["fedplat", "fedplat_client", "fedplat_server.rpc.serving"])
def test_children_that_are_forked_during_calls_live(module: str) -> None:
    program = PROGRAM.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "0\n", done.stderr


OWNED = """
import os, signal, sys, time
from pathlib import Path
from fedplat_client import cancellation
from fedplat_client._state.data_dir import DataDirectory

def fork():
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, b"x")
        while True:
            time.sleep(600)
    os.read(read, 1)
    return pid

signal.signal(signal.SIGINT, signal.SIG_DFL)
directory = DataDirectory(Path(sys.argv[1]), "host:1", "demo")
stops = []
with directory.lock(), cancellation.on_signals(lambda: stops.append("stopped")):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child := fork(), number)
        assert os.waitpid(child, 0)[1] == number, number
    left = fork()
assert not stops, stops
with directory.lock():  # although the child lives on
    os.kill(left, signal.SIGKILL)
with cancellation.on_signals(lambda: stops.append("stopped")):
    os.kill(os.getpid(), signal.SIGTERM)
    while not stops:
        time.sleep(0.01)
print("ended", flush=True)
"""


def test_a_forked_child_has_its_own_signals_and_none_of_the_locks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "ended\n", done.stderr
