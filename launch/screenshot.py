"""Opens a page in a headless Chromium: a picture of it, or what its script says.

python -m launch.screenshot runs/quickstart/report.html report.png [--width 1400] [--height 1000] [--dark]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# No sandbox: it needs rights that root in a container does not have, and the pages are our own.
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)

TIMEOUT = 60.0  # seconds for the start of the browser, and for each command


def installed() -> str | None:
    """The path of a browser that is installed."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


class NoBrowser(RuntimeError):
    """There is no Chromium, or it does not start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, help="default: the whole page")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    asyncio.run(_capture(options))


async def _capture(options: argparse.Namespace) -> None:
    async with Browser() as browser:
        await browser.open(options.page, width=options.width, dark=options.dark)
        options.picture.write_bytes(await browser.picture(options.height))


class Browser:
    """One tab of a headless Chromium, driven by its DevTools protocol.

    Usage:
        async with Browser() as browser:
            await browser.open(page, width=1400)
            assert await browser.evaluate("document.title") == "Report"
    """

    def __init__(self) -> None:
        self.errors: list[str] = []  # exceptions of the page's script, and what it wrote to console.error
        self.requests: list[str] = []  # every address that the page asked for
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Browser:
        """Raises NoBrowser."""
        program = installed()
        if program is None:
            raise NoBrowser(f"none of {', '.join(BROWSERS)} is installed; on Debian: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [program, *QUIET, f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._session = aiohttp.ClientSession()
        try:
            port = await asyncio.wait_for(self._port(), TIMEOUT)
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [tab for tab in await reply.json() if tab["type"] == "page"]
            self._socket = await self._session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0)
            for domain in ("Page", "Runtime", "Network", "Log"):
                await self.command(f"{domain}.enable")
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def open(self, page: Path, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Load a file, at a width in pixels, in light or dark."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])
        await self.command("Page.navigate", url=page.resolve().as_uri())
        while await self.evaluate("document.readyState") != "complete":
            await asyncio.sleep(0.05)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON. Raises RuntimeError where it throws."""
        reply = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {json.dumps(reply['exceptionDetails'])}")
        return reply["result"].get("value")

    async def click(self, selector: str) -> None:
        """Press the first element that a CSS selector finds."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def point(self, selector: str, share: float = 0.5) -> None:
        """Put the pointer on an element, at a share of its width; it is scrolled into view."""
        place = await self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView("
            "{block: 'center'}); const box = node.getBoundingClientRect();"
            f"return [box.left + {share} * box.width, box.top + box.height / 2]; }})()"
        )
        await self.command("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    async def picture(self, height: int | None = None) -> bytes:
        """A PNG of the page from its top; `height` in pixels, None: the whole page."""
        width, whole = await self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height or whole, "scale": 1}
        reply = await self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(reply["data"])

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its answer. Raises RuntimeError where it is refused."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=TIMEOUT)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        found = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if found["type"] == "error":
                self.errors.append(json.dumps(found["args"]))
            case "Log.entryAdded" if found["entry"]["level"] == "error":
                self.errors.append(found["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(found["request"]["url"])

    async def _port(self) -> int:
        """The port that the browser chose. Raises NoBrowser where it ended instead."""
        found = Path(self._folder.name) / "DevToolsActivePort"
        while not found.exists() or not (lines := found.read_text().splitlines()):
            if (code := self._process.poll()) is not None:
                raise NoBrowser(f"{self._process.args!r} ended with code {code} instead of starting")
            await asyncio.sleep(0.05)
        return int(lines[0])

    async def _end(self) -> None:
        """End the browser and its children, and let go of its folder."""
        await self._session.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT)
        self._folder.cleanup()


if __name__ == "__main__":
    main()
