"""What one connection tells of a server that cannot be spoken to."""

from __future__ import annotations

import gc
import socket
import struct
import threading

from fedplat.wire import proxies


def test_a_server_that_dies_during_the_handshake_leaves_no_socket_open() -> None:
    """A socket that was left open would be a ResourceWarning, and warnings are errors."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            for _ in range(40):
                connection, _ = server.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        thread = threading.Thread(target=reset)
        thread.start()
        for _ in range(20):
            for insecure in (False, True):
                proxies.describe_failure(f"127.0.0.1:{server.getsockname()[1]}", insecure=insecure)
        thread.join()
    gc.collect()
