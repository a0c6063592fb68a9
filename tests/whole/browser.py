"""Headless Chromium over the DevTools protocol, through the pipe that Chromium itself offers: no library, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

LIMIT_S = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root, and open nothing but our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One tab. `requests` are the addresses it asked for."""

    def __init__(self, program: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mxb"))
        self._commands, self._events = os.pipe(), os.pipe()
        wanted = (*FLAGS, f"--user-data-dir={self.folder}", "about:blank")
        # Chromium reads commands on descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{self._commands[0]} 4>&{self._events[1]}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, program, *wanted],
            pass_fds=(self._commands[0], self._events[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(self._commands[0])
        os.close(self._events[1])
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._read, self._heard, self._number = b"", deque[dict[str, Any]](), 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        os.close(self._commands[1])
        os.close(self._events[0])
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the tab."""
        return self._call(method, self._session, **given)

    def _call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": given}
        asked |= {"sessionId": session} if session else {}
        os.write(self._commands[1], json.dumps(asked).encode() + b"\0")
        end = time.monotonic() + LIMIT_S
        while True:
            said = self._next(end)
            if said.get("id") == self._number:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            self._note(said)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._events[0]], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            some = os.read(self._events[0], 1 << 20)
            assert some, "the browser ended"
            self._read += some
        first, _, self._read = self._read.partition(b"\0")
        return json.loads(first)

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        elif said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] == "security":
            self.complaints.append(said["params"]["entry"]["text"])

    def screen(self, width: int, height: int, scheme: str = "light") -> None:
        """Choose the size of the window and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Go to *url*."""
        self.call("Page.navigate", url=url)

    def value(self, code: str) -> Any:
        """What *code* comes to in the page; waits for promises."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """What a person reads there."""
        found = self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)

    def until(self, text: str, selector: str = "body") -> str:
        """Wait until *text* can be read there; returns all that can be."""
        end = time.monotonic() + LIMIT_S
        while text not in (found := self.text(selector)):
            assert time.monotonic() < end, f"no {text!r} in {found!r}"
            self.value("new Promise((done) => setTimeout(done, 50))")
        return found

    def picture(self, file: Path) -> None:
        """Keep what can be seen, the whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))
