"""Headless Chromium for tests, driven over its DevTools protocol: pages, real clicks and keys, and what is seen.

Every wait has a deadline, and looks at each frame that the page draws.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 30
SHIFT = 8
"""The modifier, for `Page.key`."""

_FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --remote-debugging-port=0
"""
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "?": ("Slash", 191, "?"),
    "/": ("Slash", 191, "/"),
}


class Page:
    """A tab of its own, without storage from another test."""

    def __init__(self, send: Callable[..., Any], events: list[dict[str, Any]]) -> None:
        self._send = send
        self._events = events
        for domain in ("Page", "Runtime", "Log", "Network"):
            send(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._send("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        got = self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in got:
            raise AssertionError(got["exceptionDetails"].get("exception", {}).get("description", got))
        return got["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds on the page, looking at each of its frames."""
        self.evaluate(
            f"""new Promise((resolve, reject) => {{
              const late = setTimeout(() => reject(new Error({json.dumps("not so: " + condition)} + "\\n"
                + document.body.innerText)), {DEADLINE_S * 1000});
              const look = () => {{
                if ({condition}) {{ clearTimeout(late); resolve(); }} else requestAnimationFrame(look);
              }};
              look();
            }})"""
        )

    def wait_for(self, selector: str, text: str) -> None:
        """Wait until an element that can be seen holds a text."""
        self.wait(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".some((e) => e.checkVisibility() && e.innerText.includes({json.dumps(text)}))"
        )

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def rows(self, selector: str) -> list[list[str]]:
        rows: list[list[str]] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector + ' tr')})]"
            ".map((row) => [...row.cells].map((cell) => cell.innerText))"
        )
        return rows

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        x, y = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{ block: "center" }});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str, modifiers: int = 0) -> None:
        code, number, text = _KEYS.get(key, (f"Digit{key}" if key.isdigit() else f"Key{key.upper()}", ord(key[0]), key))
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self._send("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self._send("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def resize(self, width: int, height: int, theme: str) -> None:
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def poll(self) -> None:
        """Have the page look at the server's load now, as it does when one comes back to it."""
        self.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def urls(self) -> list[str]:
        """Every address that the page asked for."""
        found = [e["params"]["request"]["url"] for e in self._seen("Network.requestWillBeSent")]
        return found + [e["params"]["url"] for e in self._seen("Network.webSocketCreated")]

    def complaints(self) -> list[str]:
        """Errors on the console, violations of the policy among them."""
        thrown = [str(e["params"]["exceptionDetails"]) for e in self._seen("Runtime.exceptionThrown")]
        return thrown + [e["params"]["entry"]["text"] for e in self._seen("Log.entryAdded")]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        self.evaluate("0")  # what happened before has arrived after it
        return [event for event in self._events if event["method"] == method]


class Browser:
    """One Chromium, at the other end of a socket."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self._events: dict[str, list[dict[str, Any]]] = {}

    @contextmanager
    def page(self) -> Iterator[Page]:
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        events = self._events[session] = []
        yield Page(lambda method, **params: self.send(method, session, **params), events)
        self.send("Target.disposeBrowserContext", browserContextId=context)

    def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        self._socket.send(json.dumps(message if session is None else {**message, "sessionId": session}))
        while True:
            reply = json.loads(self._socket.recv(timeout=2 * DEADLINE_S))
            if reply.get("id") == self._sent:
                assert "error" not in reply, (method, reply)
                return reply["result"]
            if reply.get("sessionId") in self._events:
                self._events[reply["sessionId"]].append(reply)


@contextmanager
def running(command: list[str], stream: str, mark: str, **options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a program until it is left; gives what follows the mark in its output, and the process."""
    options[stream] = subprocess.PIPE
    process = subprocess.Popen(command, text=True, **options)
    output: IO[str] = getattr(process, stream)
    reader = threading.Thread(target=output.read)  # lest the program be stuck on a full pipe
    try:
        said = next((line for line in output if mark in line), None)
        reader.start()
        assert said is not None, f"{command[0]} ended with status {process.wait(DEADLINE_S)}"
        yield said.split(mark)[1].strip(), process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        reader.join()
        output.close()


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run a Chromium that keeps its files in the empty folder `profile`."""
    command = [str(CHROMIUM), *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
    with (
        running(command, "stderr", "DevTools listening on ", stdout=subprocess.DEVNULL) as (url, _),
        connect(url, max_size=None, compression=None, ping_interval=None) as socket,
    ):
        yield Browser(socket)
