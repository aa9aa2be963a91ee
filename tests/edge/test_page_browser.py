"""The page in a real browser: pictures at two widths, keys, hostile texts, ten thousand contexts, restarts."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chromium import Chromium
from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.page.feed import Rows
from support.made_up_page import MadeUp, served
from support.scripted import Scripted
from support.sidecar import Sidecar
from support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.daemon]

NASTY = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\u202e\x07\x1b[31m'


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(browser: Chromium) -> Iterator[None]:
    """Whatever a test does, the console says nothing; a page that is left open would look for its daemon for ever."""
    browser.goto("about:blank")
    browser.errors.clear()
    browser.failures.clear()
    yield
    browser.run("0")  # reads what has come
    assert browser.errors == []


def opened(browser: Chromium, url: str) -> None:
    browser.goto(url)
    until(lambda: browser.run("!document.getElementById('panels').hidden"))
    until(lambda: browser.run("document.getElementById('share').textContent != '–'"))


def pixels(file: Path) -> tuple[int, int, set[bytes]]:
    """Width, height, and the colours of some pixels of a PNG."""
    raw, at, data, size = file.read_bytes(), 8, b"", (0, 0)
    while at < len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        if kind == b"IHDR":
            size = struct.unpack(">II", raw[at + 8 : at + 16])
            channels = {2: 3, 6: 4}[raw[at + 17]]
        elif kind == b"IDAT":
            data += raw[at + 8 : at + 8 + length]
        at += 12 + length
    rows = zlib.decompress(data)
    return *size, {rows[i : i + channels] for i in range(1, len(rows), 997)}


@pytest.mark.parametrize("width", [900, 1600])
def test_it_is_drawn_in_dark_and_light_and_nothing_overflows(browser: Chromium, tmp_path: Path, width: int) -> None:
    browser.resize(width, 1100)
    backs = {}
    with served(MadeUp().panels()) as url:
        opened(browser, url)
        for scheme in ("dark", "light"):
            browser.scheme(scheme)
            until(lambda scheme=scheme: browser.run("document.documentElement.dataset.theme") == scheme)
            backs[scheme] = browser.run("getComputedStyle(document.documentElement).backgroundColor")
            browser.picture(tmp_path / f"{scheme}.png")
            wide, high, colours = pixels(tmp_path / f"{scheme}.png")
            assert (wide, high) == (width, 1100)
            assert len(colours) > 10
        assert browser.run("document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll('section')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
        assert browser.run(f"{cut}.map((one) => one.id)") == []
        assert browser.text("#share") in ("81 %", "82 %", "83 %")
        rows = "[...document.querySelectorAll('#requests tbody tr')].length"
        assert browser.run(rows) >= 40
    assert backs["dark"] != backs["light"]
    assert browser.failures == []


def test_it_is_used_by_keys_alone(browser: Chromium) -> None:
    browser.resize(1600, 1100)
    with served(MadeUp().panels()) as url:
        opened(browser, url)
        browser.press("c")
        assert browser.run("document.activeElement.id") == "icicle"
        browser.press("ArrowRight")
        top = browser.text("#chosen h3")
        assert "tokens" in browser.text("#chosen dt")
        browser.press("ArrowDown")
        below = browser.text("#chosen h3")
        browser.press("ArrowRight")
        assert browser.text("#chosen h3") not in ("", "Select a context")
        browser.press("ArrowUp")
        assert browser.text("#chosen h3") == top != below
        browser.press("Enter")  # enlarged: others are out of sight
        browser.press("Escape")
        browser.press("Escape")
        assert browser.text("#chosen h3") == "Select a context"
        before = browser.run("document.documentElement.dataset.theme")
        browser.press("t")
        assert browser.run("document.documentElement.dataset.theme") != before
        browser.press("t")
        browser.press("?")
        assert browser.run("document.getElementById('help').open") is True
        browser.press("Escape")
        until(lambda: browser.run("document.getElementById('help').open") is False)
        seen = set()
        for _ in range(12):
            browser.press("Tab")
            seen.add(
                browser.run("(document.activeElement.closest('section, header') || {}).id || document.activeElement.id")
            )
        assert {"tree", "requests", "sessions"} <= seen
        browser.run("document.querySelector('#requests tbody tr[tabindex=\"0\"]').focus()")
        browser.press("ArrowDown")
        browser.press("Enter")
        assert browser.text("#chosen h3") != "Select a context"


def test_texts_of_others_are_texts(browser: Chromium) -> None:
    panels = MadeUp(20).panels()
    contexts = panels["contexts"]()
    nasty = Rows({one: [*row[:10], NASTY] for one, row in contexts.items()})
    panels |= {
        "contexts": lambda: nasty,
        "sessions": lambda: Rows({NASTY: [NASTY, 3, "", 0, 1.0, 2.0, False, NASTY, NASTY]}),
        "chats": lambda: Rows({NASTY: [9, 9, NASTY, NASTY, 5, ""]}),
        "requests": lambda: Rows({NASTY: [3.0, NASTY, 90, 45, {NASTY: 45}, NASTY, next(iter(nasty)), "", NASTY]}),
        "links": lambda: Rows({NASTY: [NASTY, NASTY, None, 0.0, 0, 0, 0, None, 0, 0, [[NASTY, 1, 0]]]}),
        "removals": lambda: Rows({"1": [3.0, NASTY, NASTY, 1, NASTY]}),
        "decisions": lambda: Rows({"1": [NASTY, NASTY, 9, 0.1, 0.2, NASTY]}),
        "daemon": lambda: panels_daemon | {"models": [[NASTY, NASTY, NASTY]], "failing": NASTY},
    }
    panels_daemon = MadeUp(20).panels()["daemon"]()
    with served(panels) as url:
        opened(browser, url)
        browser.press("c")
        browser.press("ArrowRight")
        until(lambda: "onerror" in browser.text("#chosen"))
        for panel in ("#requests", "#sessions", "#links", "#removals", "#about", "#state"):
            until(lambda panel=panel: "onerror" in browser.text(panel))
        assert browser.run("document.querySelectorAll('main img, main script, header img, header script').length") == 0
        assert browser.run("window.hit === undefined")
        odd = "/[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u202a-\\u202e\\u2066-\\u2069]/"
        assert browser.run(f"{odd}.test(document.body.innerText)") is False


def test_ten_thousand_contexts_are_drawn_with_no_more_strokes_than_there_are_pixels(browser: Chromium) -> None:
    """How fast that is depends on the machine, and is the bench `page`'s to say."""
    browser.resize(1600, 1100)
    with served(MadeUp(10_000).panels()) as url:
        opened(browser, url)
        until(lambda: browser.text("#tree-count") != "")
        browser.run(COUNT)
        browser.press("c")
        strokes = [browser.run("window.strokes(document.getElementById('icicle'))") for _ in range(3)]
        wide, high = browser.run("[document.getElementById('icicle').clientWidth, icicle.clientHeight]")
        assert min(strokes) > 500
        assert max(strokes) < 2.5 * wide * high / 21
        for key in ("ArrowRight", "ArrowDown", "Enter", "ArrowDown", "Enter"):
            browser.press(key)
        assert browser.text("#chosen h3") != "Select a context"


#: Counts the rectangles of one picture of a canvas.
COUNT = """(() => {
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  let count = 0;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) {
    count += this.canvas.id === "icicle";
    fill.apply(this, box);
  };
  const drawn = () => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
  window.strokes = async (canvas) => {
    canvas.dispatchEvent(new MouseEvent("mouseleave"));  // over the same context nothing is drawn anew
    await drawn();
    count = 0;
    const box = canvas.getBoundingClientRect(), at = { clientX: box.left + Math.random() * 900, clientY: box.top + 30 };
    canvas.dispatchEvent(new MouseEvent("mousemove", at));
    await drawn();
    return count;
  };
})()"""


def test_a_sidecars_page_has_its_backends_and_what_they_reused(browser: Chromium, tmp_path: Path) -> None:
    def look(backend: str) -> None:
        sidecar = Sidecar(tmp_path, ("--backend", backend, "--workers", "0"), {})
        try:
            body = {"model": "m", "messages": [{"role": "user", "content": NASTY}]}
            assert httpx.post(f"{sidecar.url}/v1/chat/completions", json=body).status_code == 200
            opened(browser, sidecar.url)
            until(lambda: browser.text("#backends tbody tr"))
            assert backend.removeprefix("http://") in browser.text("#backends")
            assert "healthy" in browser.text("#backends")
            until(lambda: browser.text("#share") == "53 %")  # 16 of 30 tokens
            assert browser.run("window.hit") is None
            assert browser.run("document.documentElement.scrollWidth") <= 1600
        finally:
            sidecar.end()

    async def run() -> None:
        async with Scripted("one") as backend:
            await asyncio.to_thread(look, backend.url)

    browser.resize(1600, 1100)
    asyncio.run(run())


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Chromium, serve: Any, tmp_path: Path) -> None:
    key = KeyFile(tmp_path / "keys.json").add("watch", ("status",))
    daemon = serve(**{"edge.api_key_file": str(tmp_path / "keys.json")})
    browser.goto(daemon.url)
    until(lambda: browser.run("!document.getElementById('key').hidden"))
    assert browser.run("document.activeElement.id") == "key-text"
    browser.write("wrong")
    browser.press("Enter")
    until(lambda: "does not open" in browser.text("#key-why"))
    browser.write(key)
    browser.press("Enter")
    until(lambda: browser.run("!document.getElementById('panels').hidden"))
    browser.goto(daemon.url)  # again, in the same tab
    until(lambda: browser.run("!document.getElementById('panels').hidden"))
    until(lambda: "no answer has ended yet" in browser.text("#sources-key"))  # each panel has its own fetch
    until(lambda: "curl" in browser.text("#tree-empty"))
    assert key not in browser.run("document.documentElement.outerHTML + location.href")
    browser.run("sessionStorage.clear()")


def test_a_page_left_open_over_a_restart_goes_on(browser: Chromium, process: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    question = {
        "messages": [{"role": "user", "content": "What is in the box? " * 16}],
        "temperature": 0,
        "max_tokens": 4,
    }
    daemon = process("--port", port)
    with daemon.ready() as http:
        assert http.post("/v1/chat/completions", json=question).status_code == 200
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        opened(browser, daemon.url)
        until(lambda: "up to date" in browser.text("#state"))
        before = browser.text("#about")
        until(lambda: browser.text("#tree-count").startswith("1 of them"))
    daemon.end(signal.SIGKILL)
    until(lambda: "no daemon answers; trying again" in browser.text("#state"))
    assert browser.run("document.getElementById('panels').classList.contains('stale')")
    assert browser.text("#tree-count").startswith("1 of them")  # what was known stays
    again = process("--port", port)
    with again.ready() as http:
        until(lambda: "up to date" in browser.text("#state"))
        assert browser.text("#about") != before
        assert not browser.run("document.getElementById('panels').classList.contains('stale')")
        assert isinstance(http, httpx.Client)
        http.post("/v1/chat/completions", json=question)
        until(lambda: "disk" in browser.text("#sources-key"))
