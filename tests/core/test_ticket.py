"""Tickets, and the bytes that are signed."""

from __future__ import annotations

import base64
import string
import traceback
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedplat.errors import TicketError
from fedplat.wire import auth
from fedplat.wire.auth import MAX_TICKET, Ticket

SECRET = "s3cret" * 7
SERVERS = st.builds("{}:{}".format, st.from_regex(r"[a-z0-9.-]{1,60}", fullmatch=True), st.integers(1, 65535))
WORDS = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=50)
TICKETS = st.builds(Ticket, SERVERS, WORDS, WORDS, st.booleans(), st.text(max_size=200))
GOOD = Ticket("fed.example.org:7443", "demo", SECRET, True, "-----BEGIN CERTIFICATE-----\n" * 50)


def shown(exc: BaseException) -> str:
    """All that a log could show of an error, its causes among them."""
    causes, cause = list[str](), exc.__cause__ or exc.__context__
    while cause is not None:
        causes += [str(cause), repr(cause)]
        cause = cause.__cause__ or cause.__context__
    return "\n".join([str(exc), repr(exc), *traceback.format_exception(exc), *causes])


def read(text: str) -> Ticket | TicketError:
    try:
        return Ticket.from_text(text)
    except TicketError as exc:
        return exc


def coded(content: object) -> str:
    return "fpt1." + base64.urlsafe_b64encode(msgspec.msgpack.encode(content)).decode()


@given(TICKETS)
def test_a_ticket_is_one_printable_line_and_back(ticket: Ticket) -> None:
    text = ticket.to_text()
    assert set(text) <= set(string.ascii_letters + string.digits + "-_.")
    for copied in (text, f"  {text}\r\n", f"\n{text}\n\n", text + "="):
        assert Ticket.from_text(copied) == ticket


@given(
    st.text() | st.text().map("fpt1.".__add__) | st.text(string.ascii_letters + "-_", max_size=400).map("fpt1.".__add__)
)
@example("")
@example("fpt1.")
@example("fpt2.AAAA")
@example("fpt1.é")
@example("fpt1.\ud800")
@example("fpt1." + "A" * MAX_TICKET)
@example(coded([]))
@example(coded(["", "", ""]))
@example(coded(["s:1", "p", "x", False, "", "more"]))
@example(coded({"server": "s:1", "population": "p", "secret": "x"}))
def test_any_text_is_a_ticket_or_a_ticket_error(text: str) -> None:
    result = read(text)
    if isinstance(result, Ticket):
        assert Ticket.from_text(result.to_text()) == result
    else:
        assert "\n" not in str(result)
        assert len(str(result)) < 300


@given(st.data())
def test_a_damaged_ticket_is_refused_and_its_secret_not_shown(data: st.DataObject) -> None:
    text = GOOD.to_text()
    place = data.draw(st.integers(0, len(text)))
    kind = data.draw(st.sampled_from(["cut", "dropped", "changed", "added"]))
    middle = data.draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=3))
    damaged = {
        "cut": text[:place],
        "dropped": text[:place] + text[place + 1 :],
        "changed": text[:place] + middle + text[place + 1 :],
        "added": text[:place] + middle + text[place:],
    }[kind]
    result = read(damaged)
    if isinstance(result, TicketError):
        assert SECRET not in shown(result)
        assert text[30:60] not in shown(result)


@pytest.mark.parametrize(
    "content",
    [
        ["fed:1", "demo", SECRET, "yes"],
        ["fed:1", "demo", SECRET, True, 5],
        ["fed:1", "demo", SECRET.encode() + b"\xff"],
        ["fed:1", SECRET, ""],
        [SECRET],
        {"secret": SECRET},
        ["fed:1", "demo", SECRET, True, "", SECRET],
    ],
)
def test_what_is_no_ticket_inside_is_refused_and_not_shown(content: Any) -> None:
    with pytest.raises(TicketError, match=r"damaged|incomplete") as caught:
        Ticket.from_text(coded(content))
    assert SECRET not in shown(caught.value)


def test_bytes_that_are_no_text_are_not_shown() -> None:
    packed = msgspec.msgpack.encode(["fed:1", "demo", SECRET + "!"]).replace(b"!", b"\xff")
    with pytest.raises(TicketError, match="damaged") as caught:
        Ticket.from_text("fpt1." + base64.urlsafe_b64encode(packed).decode())
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format])
def test_a_ticket_does_not_show_its_secret(show: Any) -> None:
    assert SECRET not in show(GOOD)
    assert "fed.example.org:7443" in show(GOOD)


@pytest.mark.parametrize(
    "server", ["nonsense", "host:", ":1", "host:0", "host:70000", "a b:1", "h:1\nh:2", "http://h:1", "h:1/x", "::1:1"]
)
def test_a_ticket_leads_to_host_and_port(server: str) -> None:
    """Else the client would wait forever for a server that cannot be."""
    with pytest.raises(TicketError, match="server is"):
        Ticket.from_text(Ticket(server, "demo", SECRET).to_text())


@pytest.mark.parametrize("server", ["host:1", "127.0.0.1:65535", "[::1]:7443", "fed_1.example.org:443"])
def test_servers_that_can_be(server: str) -> None:
    assert Ticket.from_text(Ticket(server, "demo", SECRET).to_text()).server == server


# --- what is signed --------------------------------------------------------------------------------------------------

NAMES = st.text(max_size=20)
COUNTERS = st.integers(0, auth.MAX_COUNTER)
CALLS = st.tuples(NAMES, NAMES, COUNTERS, st.binary(max_size=20))
PROOFS = st.tuples(NAMES, st.binary(max_size=20), st.binary(max_size=20))


def moved(one: str, other: str, draw: Any) -> tuple[str, str]:
    """The same letters, divided at another place."""
    both = one + other
    place = draw(st.integers(0, len(both)))
    return both[:place], both[place:]


@pytest.mark.fault("F21")
@given(st.data())
def test_different_calls_never_give_the_same_bytes(data: st.DataObject) -> None:
    method, session_id, counter, request = data.draw(CALLS)
    near = (*moved(method, session_id, data.draw), counter, request)
    for other in (near, (method, session_id, data.draw(COUNTERS), request), data.draw(CALLS)):
        same = auth.call_payload(method, session_id, counter, request) == auth.call_payload(*other)
        assert same == ((method, session_id, counter, request) == other)


@pytest.mark.fault("F21")
@given(st.data())
def test_different_proofs_never_give_the_same_bytes(data: st.DataObject) -> None:
    method, nonce, request = data.draw(PROOFS)
    both = method.encode() + nonce
    place = data.draw(st.integers(0, len(both)))
    near = (both[:place].decode(errors="replace"), both[place:], request)
    for other in (near, (method, nonce, data.draw(st.binary(max_size=20))), data.draw(PROOFS)):
        same = auth.proof_payload(method, nonce, request) == auth.proof_payload(*other)
        assert same == ((method, nonce, request) == other)


@pytest.mark.fault("F21")
@given(PROOFS, CALLS)
def test_a_proof_is_never_a_call(proof: tuple[str, bytes, bytes], call: tuple[str, str, int, bytes]) -> None:
    assert auth.proof_payload(*proof) != auth.call_payload(*call)
