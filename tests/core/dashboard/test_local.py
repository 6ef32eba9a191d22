"""`fedplat dashboard`: what it prints, and what it gives to the browser."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fedplat.dashboard import serving
from fedplat.web.serving import LocalPageOptions
from support.dashboard.fake_server import FakeServer


def test_the_code_is_in_no_argument_of_the_browser() -> None:
    """It is in a file that only this user can read, and that is gone at the end."""
    printed: list[str] = []
    opened: list[tuple[str, str, list[int]]] = []
    theirs, ours = os.pipe()

    def open_browser(url: str) -> None:
        path = Path(url2pathname(urlsplit(url).path))
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)]
        opened.append((url, path.read_text(), modes))
        os.close(ours)  # the dashboard ends with its parent

    try:
        serving.serve_locally(FakeServer(), LocalPageOptions("127.0.0.1:0", printed.append, open_browser, theirs))
    finally:
        os.close(theirs)
    ((url, content, modes),), (address,) = opened, printed
    code = address.partition("?code=")[2]
    assert code not in url
    assert url.startswith("file:///")
    assert f'content="0; url={address}"' in content
    assert modes == [0o600, 0o700]
    assert not Path(url2pathname(urlsplit(url).path)).parent.exists()
