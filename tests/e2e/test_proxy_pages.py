"""A proxy that answers with a page of HTML, here nginx: one sentence, over both transports and for operators."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, errors, transport
from fedplat_server.auth import tls
from fedplat_server.auth.pki_folder import PkiFolder
from support import load_balancers, processes
from support.processes import BIN

pytestmark = pytest.mark.slow
LOGIN = (
    "<html><head><style>a {}</style><title>Log in</title></head><body><script>x()</script>to &amp; fro</body></html>"
)
PAGES = {
    "login": (f"default_type text/html; return 200 '{LOGIN}';", 200, "Log in to & fro", "it may want a login"),
    "redirection": ("return 302 https://login.example.org/;", 302, "302 Found", "it may want a login"),
    "forbidden": ("return 403;", 403, "403 Forbidden", "ask its administrator"),
    "missing": ("return 404;", 404, "404 Not Found", "check the address of the server"),
    "too many": ("return 429;", 429, "429 Too Many Requests", "raise its limit on the number"),
    "no server": ("", 502, "502 Bad Gateway", "check that the server runs"),
}


@pytest.fixture
def pki(tmp_path: Path) -> PkiFolder:
    made = PkiFolder.of(tmp_path / "data")
    made.make_authority(tls.utc_now())
    made.make_server(["localhost", "127.0.0.1"], tls.utc_now())
    return made


def call(route: transport.ServerRoute) -> errors.CallError:
    method = transport.Method("GetChallenge", fleet_pb2.GetChallengeResponse)
    channel = route.open()
    request = fleet_pb2.GetChallengeRequest(protocol_version=1).SerializeToString()
    with pytest.raises(errors.CallError) as caught:
        transport.result(method.start(channel, request, 20.0, ()), cancellation.StopSignal())
    channel.close()
    return caught.value


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_sentence_with_its_status_and_its_text(pki: PkiFolder, tmp_path: Path, name: str) -> None:
    answer, status, text, advice = PAGES[name]
    nowhere = f"127.0.0.1:{processes.free_port()}"
    for http2 in (False, True):
        with load_balancers.nginx(pki, tmp_path / f"nginx-{http2}", nowhere, http2=http2, answer=answer) as (
            address,
            _,
        ):
            route = transport.ServerRoute(address, True, pki.ca.read_text(), transport="grpc" if http2 else "http")
            found = call(route)
            assert isinstance(found, errors.UnreachableError), found
            said = str(found)
            if not http2:
                assert f"the HTTP status {status} and '{text}" in said
            elif status != 200:
                assert f"the HTTP status {status}: " in said
            assert advice in said
            assert said.isprintable()
            transport_name = "grpc" if http2 else "http"
            command = [f"{BIN}/fedplat", "--transport", transport_name, "--timeout", "0", "--server", address]
            command += ["--ca", str(pki.ca), "status"]
            environment = {"FEDPLAT_TOKEN": "t" * 43, "HOME": str(tmp_path)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
            assert done.returncode == 5, done.stderr
            assert len(done.stderr.splitlines()) == 1
            assert advice in done.stderr
