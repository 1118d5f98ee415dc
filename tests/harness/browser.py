"""Chromium without a window, told what to do over a pipe (Chrome DevTools Protocol): for tests of pages.

`scripts/browser.sh` sees to a Chromium.
"""

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from fcntl import F_DUPFD, fcntl

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: No user, no network, no GPU; root has no sandbox.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


def executable():
    """The path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser."""

    def __init__(self, write, read):
        self._write, self._read, self._number, self._rest, self._session = write, read, 0, b"", None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self.send(f"{domain}.enable")
        #: Errors of scripts, and addresses that pages asked for.
        self.errors, self.asked = [], []
        self.send("Network.enable")

    def send(self, method, **params):
        """Send a command, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != self._number:
            self._note(told)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        return told["result"]

    def _next(self):
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, told):
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(told["params"]["exceptionDetails"])
        if told.get("method") == "Network.requestWillBeSent":
            self.asked.append(told["params"]["request"]["url"])

    def open(self, path, width=1280, height=800):
        """Open a file in a window of this size; phones are narrow, and scale nothing."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.errors, self.asked = [], []
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self._next_event() != "Page.loadEventFired":
            pass

    def _next_event(self):
        self._note(told := self._next())
        return told.get("method")

    def ask(self, expression):
        """The value of a JavaScript expression on the page."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def press(self, key, code):
        """Press a key, as a user does: it goes to the element that has the focus."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, x, y):
        """Click or tap at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path):
        """Write what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browsing(folder):
    """A `Browser`, with its profile in a folder."""
    commands, write = os.pipe()
    read, answers = os.pipe()

    def as_3_and_4():
        high = [fcntl(each, F_DUPFD, 10) for each in (commands, answers)]
        for low, each in zip((3, 4), high):
            os.dup2(each, low)

    flags = (*FLAGS, f"--user-data-dir={folder}")
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [executable(), *flags], stdout=log, stderr=log, close_fds=False, preexec_fn=as_3_and_4
        )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(write, read)
    finally:
        process.terminate()
        process.wait(20)
        os.close(write)
        os.close(read)
