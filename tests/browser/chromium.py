"""Chromium, headless, driven through its debugging protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a Chromium of its own. `messages`: console errors and exceptions; `requests`: what was asked for."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._number, self._answers, self._waiting = 0, {}, {}

    async def __aenter__(self) -> Browser:
        self._process = subprocess.Popen(
            [PATH, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
             "--remote-debugging-port=0", f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port = await self._port()
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(t for t in await answer.json() if t["type"] == "page")
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def _port(self) -> int:
        file, until = Path(self._profile.name) / "DevToolsActivePort", time.monotonic() + 60
        while time.monotonic() < until:
            if file.exists() and len(lines := file.read_text().split()) >= 1:
                return int(lines[0])
            if self._process.poll() is not None:
                raise RuntimeError(f"{PATH} ended with status {self._process.returncode}")
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{PATH} did not open its debugging port within a minute")

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
                continue
            method, params = data["method"], data["params"]
            if method == "Runtime.exceptionThrown":
                self.messages.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.messages.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.messages.append(params["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"][:300])
            for future in self._waiting.pop(method, []):
                future.set_result(params)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        data = await asyncio.wait_for(future, 60)
        assert "error" not in data, (method, data)
        return data["result"]

    async def loaded(self, action: Any) -> None:
        """Do `action`, and wait until the page it leads to is loaded."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault("Page.loadEventFired", []).append(future)
        await action
        await asyncio.wait_for(future, 60)

    async def open(self, url: str) -> None:
        await self.loaded(self.call("Page.navigate", url=url))

    async def value(self, script: str) -> Any:
        """Value of an expression of JavaScript."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            pressed = {"text": text} if text and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **pressed
            )

    async def look(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Size of the window, and which of light and dark the reader prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
