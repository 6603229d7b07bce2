"""A headless Chromium for tests, steered through its DevTools protocol on one websocket; the fixture ``browser`` is one tab."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    pytest.importorskip("websockets", reason="websockets is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium found: none of {', '.join(NAMES)} is on the PATH")
    return found


class Page:
    """One tab. ``problems`` collects what its console, its scripts and its network had to complain about."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.last = socket, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self.last:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE_S) -> None:
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, f"{expression} never became true"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        for kind in ("Moved", "Pressed", "Released"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the first element that fits the selector is, after scrolling it into view."""
        answer = self.js(
            "((e) => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        self.settle()
        return answer[0], answer[1]

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def fits(self, url: str, *, width: int, dark: bool, texts: str) -> None:
        """Open a page: it scrolls only down, no text of the selector leaves its picture, and its colours are the reader's."""
        outside = f"""[...document.querySelectorAll({json.dumps(texts)})].filter((text) => {{
            const a = text.getBoundingClientRect(), b = text.closest('svg').getBoundingClientRect();
            return a.width && (a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1);
        }}).map((text) => text.textContent)"""
        self.open(url, width=width, dark=dark)
        self.settle()
        assert self.js("document.documentElement.scrollWidth <= innerWidth")
        assert self.js(outside) == []
        ground = self.js("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) is dark

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A Page of a browser whose profile lies in ``folder``; closed on leaving."""
    from websockets.sync.client import connect

    flags = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "--no-first-run"]
    flags += ["--disable-gpu", "--disable-extensions", "--no-default-browser-check", "--disable-dev-shm-usage"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--no-sandbox")  # a browser refuses its sandbox to root, as in a container
    process = subprocess.Popen([chromium(), *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _port(folder / "profile" / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE_S) as answer:
            tabs = json.load(answer)
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(address, max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the browser has chosen; it writes it once it listens."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.skip(f"Chromium ended at once with code {process.returncode}")
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    pytest.skip(f"Chromium did not open its port within {PATIENCE_S:.0f} s")
