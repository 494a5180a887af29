"""The page of a privacy report in a real browser.

A harness shows the page in frames of two widths and measures it from outside: the page
itself is not changed.  Two more frames hold a page that tries to load a picture and to
run a script, with and without the content security policy.
"""

from __future__ import annotations

import contextlib
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.html_report import facts, page

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--dump-dom",
)  # fmt: skip
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
MEASURE = """
const measure = ({ contentDocument: page, contentWindow: view }) => ({
  width: page.documentElement.clientWidth,
  needed: page.documentElement.scrollWidth,
  background: view.getComputedStyle(page.body).backgroundColor,
  requests: view.performance.getEntriesByType("resource").length,
  title: page.title,
});
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def browser() -> str:
    """The program; skips if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH; `make browser` installs Debian's")
    return found


@contextlib.contextmanager
def served(harness: bytes) -> Iterator[tuple[str, list[str]]]:
    """The address of a page on this machine, and the requested paths."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(harness if self.path == "/" else b"")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()
        thread.join()


def planted(text: str, name: str) -> str:
    """The page, with a picture and a script."""
    fault = f'<img src="/{name}"><script>document.title = "ran"</script></body>'
    return text.replace("</body>", fault)


def harness_of(text: str) -> bytes:
    without = POLICY.sub("", text)
    assert without != text
    frames = [
        (360, text), (1280, text),
        (360, planted(text, "forbidden")), (360, planted(without, "control")),
    ]  # fmt: skip
    shown = "".join(
        f'<iframe width="{width}" height="800" style="border: 0" '
        f'srcdoc="{html.escape(each)}"></iframe>'
        for width, each in frames
    )
    return f"<pre id=found></pre>{shown}<script>{MEASURE}</script>".encode()


def look(
    browser: str, text: str, folder: pathlib.Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns what a browser that prefers dark pages measured, and its requests."""
    with served(harness_of(text)) as (address, asked):
        command = [
            browser, *FLAGS, f"--user-data-dir={folder}",
            "--blink-settings=preferredColorScheme=0", address,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600
        )
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found)), asked


def test_the_page_fits_is_dark_if_asked_and_asks_for_nothing(
    browser: str, make_run: Any, audit_of: Any, tmp_path: pathlib.Path
) -> None:
    run = make_run("dynamic-shuffle-dp-sgd-eps3-seed0-" + "x" * 40)
    text = page.render(facts.collect(run, audit=audit_of()))
    found, asked = look(browser, text, tmp_path / "browser")
    phone, desktop, forbidden, control = found
    assert (phone["width"], desktop["width"]) == (360, 1280)
    for seen in (phone, desktop):
        assert seen["needed"] == seen["width"]
        assert seen["requests"] == 0
        assert sum(map(int, re.findall(r"\d+", seen["background"]))) < 3 * 128
    # The policy holds; without it, the harness would have seen it broken.
    assert "/forbidden" not in asked
    assert forbidden["title"] == phone["title"]
    assert "/control" in asked
    assert control["title"] == "ran"
