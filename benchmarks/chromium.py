"""A headless Chromium, driven over its DevTools protocol: pages, keys, pictures, and what its console says."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.children import wait_or_kill
from ctxreuse.errors import ConfigError

__all__ = ["INSTALL", "Chromium", "chromium"]

INSTALL = "apt-get install chromium"
#: In the background it would look for its maker's hosts.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_KEYS = {
    "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9,
}  # fmt: skip


_WAIT = 60.0


def _until(done: Callable[[], object]) -> None:
    end = time.monotonic() + _WAIT
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing for {_WAIT:g} s")
        time.sleep(0.05)


def chromium() -> str | None:
    """The browser's command; None if there is none."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one page. Use it as a context manager, in one thread."""

    def __init__(self, width: int = 1600, height: int = 1100) -> None:
        self._size = width, height
        #: What the console said of errors and warnings.
        self.errors: list[str] = []
        #: Of these, what the network failed at.
        self.failures: list[str] = []

    def __enter__(self) -> Chromium:
        command = chromium()
        if command is None:
            raise ConfigError("there is no Chromium", fix=f"Run: {INSTALL}")
        self._folder = tempfile.TemporaryDirectory(prefix="ctxreuse-chromium-", ignore_cleanup_errors=True)
        self._child = subprocess.Popen(
            [command, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"HOME": self._folder.name},
        )  # fmt: skip
        file = Path(self._folder.name) / "DevToolsActivePort"
        _until(lambda: file.exists() and len(file.read_text().split()) == 2)
        self._port = int(file.read_text().split()[0])
        self._runner = asyncio.Runner()
        self._number = 0
        self._runner.run(self._open())
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*self._size)
        return self

    async def _open(self) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{self._port}/json/list") as answer:
            pages = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            await self._socket.close()
            await self._session.close()

        self._runner.run(close())
        self._runner.close()
        self._child.terminate()
        wait_or_kill(self._child, 10)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol."""

        async def send() -> Any:
            self._number += 1
            await self._socket.send_json({"id": self._number, "method": method, "params": params})
            async with asyncio.timeout(_WAIT):
                while True:
                    message = await self._socket.receive_json()
                    if message.get("id") == self._number:
                        assert "error" not in message, f"{method}: {message['error']}"
                        return message["result"]
                    self._note(message)

        return self._runner.run(send())

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            text = f"{entry['source']}: {entry['text']} {entry.get('url', '')}"
            (self.failures if entry["source"] == "network" else self.errors).append(text)
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))

    def goto(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)
        _until(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The text of an element that is shown; "" if there is none."""
        return str(self.run(f"(document.querySelector({selector!r}) || {{}}).innerText || ''"))

    def resize(self, width: int, height: int, ratio: float = 1) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=False
        )

    def scheme(self, name: str) -> None:
        """Prefer dark or light."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = _KEYS.get(key, ord(key[0].upper()))
        typed = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        about = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def click(self, x: float, y: float) -> None:
        """Click at a place."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what the page looks like as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))
