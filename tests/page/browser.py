# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, spoken to through its debugging protocol: no package is needed for it."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0


def executable() -> str | None:
    """The Chromium of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `complaints` are what it wrote to its console as errors, and exceptions."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection, self.numbers = connection, itertools.count(1)
        self.complaints: list[str] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        message = {"id": next(self.numbers), "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.connection.send(json.dumps(message))
        while True:
            answer = json.loads(self.connection.recv(PATIENCE))
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the window's size, and what the system's colours are said to be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """What an expression gives."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression gives something true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({script})"):
            text = self.value("document.body?.innerText")
            assert time.monotonic() < end, f"{script} did not come true on a page with {text}"
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run Chromium as long as the block does."""
    program = executable()
    assert program, "there is no Chromium on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            program,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            try:
                with connect(_address(child), max_size=1 << 28) as connection:
                    yield Browser(connection)
            finally:
                child.kill()


def _address(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    for line in child.stderr:
        if found := re.search(r"DevTools listening on (\S+)", line):
            return found[1]
    raise AssertionError("Chromium ended before it listened")
