"""TLS with real handshakes: refusals and their messages, and certificates that change under a running server."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import structlog
from grpc import aio

from fedplat.admin import AdminClient
from fedplat.admin.profile import Profile
from fedplat.errors import ServerUnreachableError
from fedplat.wire import proxies
from fedplat_server.auth import pki_folder, tls
from fedplat_server.auth import pki_folder as pki
from fedplat_server.auth.pki_folder import Authority, PkiFolder, certificate_pem, key_pem
from fedplat_server.auth.tls import Certificates, utc_now
from fedplat_server.config import TlsFiles
from fedplat_server.errors import ConfigError
from support import daemons
from support.access import ADMIN_TOKEN
from support.jobs import job_file

pytestmark = pytest.mark.calm  # they look at single answers
DAY = datetime.timedelta(days=1)


@pytest.fixture
def folder_pki(folder: Path) -> PkiFolder:
    made = PkiFolder.of(folder)
    made.make_authority(utc_now())
    made.make_server(pki_folder.all_hosts([]), utc_now())
    return made


def sign(made: PkiFolder, *, days: float = 10.0, hosts: tuple[str, ...] = ("localhost",)) -> None:
    """Gives the server another certificate of its authority, which expires in `days` days."""
    key = pki.new_key()
    now = utc_now() - 30 * DAY
    certificate = made.authority().for_server(hosts, key.public_key(), now, (30 + days) * DAY)
    pki_folder.replace(made.files.key, key_pem(key), 0o600)
    pki_folder.replace(made.files.certificate, certificate_pem(certificate), 0o644)


def running(folder: Path, made: PkiFolder, **options: Any) -> Any:
    return daemons.running(folder, tls=made.files, **options)


# --- the messages for connections that fail ------------------------------------------------------------------------


def said(profile: Profile) -> str:
    with AdminClient(profile, timeout_s=60.0) as client, pytest.raises(ServerUnreachableError) as caught:
        client.status()
    text = str(caught.value)
    assert ADMIN_TOKEN not in text
    assert "\n" not in text
    return text


async def test_each_misunderstanding_is_named(folder: Path, folder_pki: PkiFolder) -> None:
    ca = folder_pki.ca.read_text()
    stranger = certificate_pem(Authority.new(utc_now()).certificate).decode()
    async with running(folder, folder_pki) as site:
        here = f"localhost:{site.daemon.port}"
        assert "it uses TLS, but plaintext was expected" in await asyncio.to_thread(
            lambda: said(Profile(here, insecure=True))
        )
        for wrong in (stranger, ""):
            text = await asyncio.to_thread(said, Profile(here, ca=wrong))
            assert "was not issued by a trusted authority" in text
        sign(folder_pki, hosts=("fed.example.org",))
        for host in ("localhost", "127.0.0.1"):
            address = f"{host}:{site.daemon.port}"
            text = await asyncio.to_thread(said, Profile(address, ca=ca))
            assert f"its certificate is not valid for {host}" in text
    async with daemons.running(folder) as site:
        text = await asyncio.to_thread(lambda: said(Profile(site.address, ca=ca)))
        assert "it uses plaintext, but TLS was expected" in text


async def test_an_expired_certificate_is_named(folder: Path, folder_pki: PkiFolder, monkeypatch: Any) -> None:
    """The server's clock is behind, since otherwise it would refuse such a certificate."""
    sign(folder_pki, days=-1)
    real = tls.utc_now
    monkeypatch.setattr(tls.Certificates.__init__, "__defaults__", (lambda: real() - 2 * DAY,))
    async with running(folder, folder_pki) as site:
        ca = folder_pki.ca.read_text()
        text = await asyncio.to_thread(lambda: said(Profile(f"localhost:{site.daemon.port}", ca=ca)))
        assert "its certificate has expired" in text
        assert "certificates renew" in text


def test_neither_a_good_connection_nor_a_missing_server_has_a_problem(folder: Path) -> None:
    assert proxies.describe_failure("localhost:1") == ""
    assert proxies.describe_failure("no such host:1") == ""
    assert proxies.describe_failure("localhost:nonsense", insecure=True) == ""


# --- the status --------------------------------------------------------------------------------------------------


async def test_the_status_tells_the_days_that_are_left(folder: Path, folder_pki: PkiFolder) -> None:
    sign(folder_pki, days=20)
    async with running(folder, folder_pki) as site:
        status = await site.status()
        assert not status.insecure
        assert 19.9 < status.certificate_days_left < 20.0
    async with daemons.running(folder) as site:
        assert (await site.status()).insecure


# --- files that change ---------------------------------------------------------------------------------------------


@pytest.mark.fault("F31")
async def test_certificate_and_authority_change_in_the_middle_of_a_round(folder: Path, folder_pki: PkiFolder) -> None:
    """One client stays connected, another connects with each new certificate; no attempt or report is lost."""
    old_ca = folder_pki.ca.read_bytes()

    def renew(now: datetime.datetime) -> None:
        folder_pki.renew(folder_pki.hosts(), now)

    async with running(folder, folder_pki) as site:
        job = await site.operator.start(job_file(goal=2, rounds=3))
        first, second = await site.fleet(2)
        served: list[bytes] = []
        for round_, change in enumerate((renew, folder_pki.rotate, folder_pki.finish_rotation), 1):
            mine, other = await site.assign([first, second])
            change(utc_now())
            # The new connection's handshake is the first one with the new files; it knows the current authorities.
            served.append(folder_pki.files.certificate.read_bytes())
            fresh = second.over(site.connect(folder_pki.ca.read_bytes()))
            if round_ < 3:  # a client that knows only the old authority can connect until that is removed
                await second.over(site.connect(old_ca)).query(other.token, "0" * 64)
            base = daemons.initial_model()
            await fresh.deliver(other.token, daemons.update_of(base, 1))
            await first.deliver(mine.token, daemons.update_of(base, 2))
            await site.operator.until(job, "version", str(round_), round_)
        assert len(set(served)) == 3
        attempts = await site.operator.rounds(job)
        assert [(one.round, one.attempt, one.reported, one.failed, one.dropped) for one in attempts] == [
            (1, 1, 2, 0, 0),
            (2, 1, 2, 0, 0),
            (3, 1, 2, 0, 0),
        ]
        with pytest.raises(Exception, match=r"UNAVAILABLE|CERTIFICATE_VERIFY_FAILED"):
            await daemons.Operator(site.connect(old_ca)).show(job)


@pytest.mark.fault("F31")
async def test_every_port_takes_up_new_files_whichever_saw_them_first(folder_pki: PkiFolder) -> None:
    certificates = Certificates(folder_pki.files)
    server = aio.server()
    ports = [server.add_secure_port("127.0.0.1:0", certificates.credentials()) for _ in range(2)]
    await server.start()
    try:
        for _ in range(2):
            certificates.check_files()
            expected = folder_pki.files.certificate.read_bytes().strip()
            shown = [
                await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) for port in (*ports, *ports)
            ]
            assert {one.encode().strip() for one in shown} == {expected}
            folder_pki.renew(folder_pki.hosts(), utc_now())
    finally:
        await server.stop(0)


@pytest.mark.fault("F31")
def test_broken_files_are_not_taken_and_said_once(folder_pki: PkiFolder) -> None:
    files = folder_pki.files
    certificates = Certificates(files)
    good = certificates.loaded
    breaks = [
        lambda: files.certificate.write_bytes(b"rubbish"),
        lambda: files.key.write_bytes(key_pem(pki.new_key())),
        lambda: sign(folder_pki, days=-1),
        lambda: files.key.unlink(),
    ]
    for break_ in breaks:
        with structlog.testing.capture_logs() as lines:
            break_()
            for _ in range(3):
                assert not certificates.refresh()
        assert certificates.loaded is good
        assert [line["log_level"] for line in lines] == ["error"]
        assert "PRIVATE" not in json.dumps(lines)
    sign(folder_pki)
    assert certificates.refresh()
    assert certificates.loaded is not good


def test_files_that_are_replaced_one_after_the_other_are_no_error(folder_pki: PkiFolder) -> None:
    certificates = Certificates(folder_pki.files)
    before = folder_pki.files.certificate.read_bytes()
    sign(folder_pki)
    after = folder_pki.files.certificate.read_bytes()
    pki_folder.replace(folder_pki.files.certificate, before, 0o644)
    with structlog.testing.capture_logs() as lines:
        assert not certificates.refresh()  # the new key with the old certificate
        pki_folder.replace(folder_pki.files.certificate, after, 0o644)
        assert certificates.refresh()
    assert [line["log_level"] for line in lines] == ["info"]


@pytest.mark.parametrize(
    ("days", "event"),
    [(20.0, None), (13.0, "the server's certificate expires soon"), (-1.0, "the server's certificate has expired")],
)
def test_the_log_warns_of_the_end(days: float, event: str | None, folder_pki: PkiFolder) -> None:
    sign(folder_pki, days=days)
    start = utc_now() - 10 * DAY
    moment = [start]
    certificates = Certificates(folder_pki.files, lambda: moment[0])
    moment[0] = start + 10 * DAY
    with structlog.testing.capture_logs() as lines:
        certificates.check_files()
    assert [line["event"] for line in lines] == ([event] if event is not None else [])


def test_a_server_does_not_start_with_unusable_certificates(folder_pki: PkiFolder) -> None:
    sign(folder_pki, days=-1)
    with pytest.raises(ConfigError, match=r"expired .* certificates renew"):
        Certificates(folder_pki.files)
    with pytest.raises(ConfigError, match="cannot be read"):
        Certificates(TlsFiles(folder_pki.folder / "none.pem", folder_pki.files.key))


# --- the private authority -----------------------------------------------------------------------------------------


def test_a_rotation_that_was_cut_short_can_be_repeated(folder_pki: PkiFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = pki_folder.replace, [0]

    def cut(path: Path, content: bytes, mode: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ConfigError("a power cut, says the test")
        real(path, content, mode)

    for steps in range(4):
        monkeypatch.setattr(pki_folder, "replace", cut)
        left[0] = steps
        with pytest.raises(ConfigError, match="power cut"):
            folder_pki.rotate(utc_now())
        monkeypatch.setattr(pki_folder, "replace", real)
        tls.load(folder_pki.files, utc_now()) if steps != 2 else None
        folder_pki.authority()
    folder_pki.rotate(utc_now())
    assert len(pki_folder.read(folder_pki.ca)) == 2
    folder_pki.ca_key.rename(folder_pki.folder / "ca-next.key")  # the last step was missing
    folder_pki.finish_rotation(utc_now())
    assert len(pki_folder.read(folder_pki.ca)) == 1
    assert len(pki_folder.read(folder_pki.files.certificate)) == 1
    for again in (folder_pki.finish_rotation,):
        with pytest.raises(ConfigError, match="begin with"):
            again(utc_now())


@pytest.mark.parametrize("host", ["", "a b", "h:1", "http://h", "a,b", "-a", "é", "x" * 300])
def test_hosts_that_no_certificate_can_have(host: str) -> None:
    with pytest.raises(ConfigError, match="expected a host name or an address"):
        pki_folder.all_hosts([host])


def test_hosts_of_a_certificate(folder_pki: PkiFolder) -> None:
    folder_pki.renew(pki_folder.all_hosts(["fed.example.org", "10.0.0.7", "2001:db8::1"]), utc_now())
    wanted = {"fed.example.org", "10.0.0.7", "2001:db8::1", "localhost", "127.0.0.1", "::1"}
    assert set(folder_pki.hosts()) == wanted
