"""The options of the dashboard that a daemon starts: an address for which its certificate is valid, and its names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedplat_server import dashboard_process
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.cli.main import main
from fedplat_server.config import ServerConfig, TlsFiles


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("pki")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedplat-server", "init", "--data-dir", str(folder), "--host", "fed.example.org"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (0, None)
    return PkiFolder.of(folder).files


def config(listen: str, tls: TlsFiles | None, advertise: str = "") -> ServerConfig:
    return ServerConfig(
        listen=listen,
        data_dir=Path("/data"),
        database="sqlite://",
        tls=tls,
        advertise=advertise,
        dashboard_listen="0.0.0.0:7480" if tls else "127.0.0.1:7480",
    )


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:7443", "127.0.0.1:7443"),
        ("0.0.0.0:7443", "localhost:7443"),
        ("[::]:7443", "localhost:7443"),
        ("fed.example.org:7443", "fed.example.org:7443"),
        ("10.0.0.1:7443", "fed.example.org:7443"),
    ],
)
def test_the_dashboard_uses_an_address_of_the_certificate(files: TlsFiles, listen: str, expected: str) -> None:
    options = dashboard_process.make_options(config(listen, files), 7443)
    assert options.profile.server == expected
    assert not options.profile.insecure
    assert "BEGIN CERTIFICATE" in options.profile.ca
    assert {"fed.example.org", "localhost", "127.0.0.1"} <= set(options.hosts)
    assert options.certificate == str(files.certificate)
    assert options.profile.token == ""


def test_without_tls_it_uses_loopback() -> None:
    options = dashboard_process.make_options(config("127.0.0.1:7443", None), 7443)
    assert (options.profile.server, options.profile.insecure, options.certificate) == ("127.0.0.1:7443", True, "")
    assert set(options.hosts) == {"localhost", "127.0.0.1", "::1"}
