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
SCHEMES = {"dark": "0", "light": "1"}
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
MEASURE = """
const channel = c => { c /= 255; return c <= .04045 ? c / 12.92
  : ((c + .055) / 1.055) ** 2.4 };
const light = rgb => { const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number);
  return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b) };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05) };
const measure = frame => {
  const { contentDocument: page, contentWindow: view } = frame;
  const style = element => view.getComputedStyle(element);
  const behind = element => { for (let e = element; e; e = e.parentElement) {
    const color = style(e).backgroundColor;
    if (!/, 0\\)$/.test(color)) return color } return "rgb(255, 255, 255)" };
  const texts = [...page.body.querySelectorAll("*")].filter(element =>
    [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim())
    && !["TITLE", "DESC"].includes(element.tagName.toUpperCase()));
  const color = element => element instanceof view.SVGElement ? style(element).fill
    : style(element).color;
  return {
    width: page.documentElement.clientWidth,
    needed: page.documentElement.scrollWidth,
    background: style(page.body).backgroundColor,
    texts: texts.length,
    contrast: Math.min(...texts.map(e => contrast(color(e), behind(e)))),
    requests: view.performance.getEntriesByType("resource").length,
    outside: [...page.querySelectorAll("svg text")].filter(text => {
      const box = text.getBBox();
      return box.x < 0 || box.y < 0 || box.x + box.width > 340
        || box.y + box.height > 212 }).length,
    title: page.title,
  } };
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


#: Curves whose labels are long.
HARD = [
    {"step": 0, "accuracy": 0.2191, "auc": None, "log_loss": 1e-7, "loss": -3e6},
    {"step": 1_000_000, "accuracy": 0.2192, "auc": 0.5, "log_loss": 3e-7, "loss": 3e6},
    {"step": 1_900_000, "accuracy": 0.2195, "auc": 0.5, "log_loss": 2e-7, "loss": 0.0},
]


@pytest.fixture
def text(make_run: Any, audit_of: Any) -> str:
    """A page with everything on it, of a run with a long name and hard curves."""
    run = make_run("dynamic-shuffle-dp-sgd-eps3-seed0-" + "x" * 40)
    points = [{**point, "num_examples": 300} for point in HARD]
    for name, more in (
        ("curve.json", {"points": points}),
        ("metrics.json", {**points[-1], "aggregates": {}, "uncertainty": None}),
    ):
        (run / name).write_text(json.dumps({"examples": "held-out", **more}))
    found = facts.collect(run, audit=audit_of())
    return page.render(found)


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
    browser: str, text: str, scheme: str, folder: pathlib.Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the browser's measurements of the frames, and its requests."""
    with served(harness_of(text)) as (address, asked):
        command = [
            browser, *FLAGS, f"--user-data-dir={folder / scheme}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", address,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600
        )
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(html.unescape(found)), asked


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_fits_reads_well_and_asks_for_nothing(
    browser: str, text: str, scheme: str, tmp_path: pathlib.Path
) -> None:
    found, asked = look(browser, text, scheme, tmp_path)
    phone, desktop, forbidden, control = found
    assert (phone["width"], desktop["width"]) == (360, 1280)
    for seen in (phone, desktop):
        assert seen["needed"] == seen["width"]
        assert seen["texts"] > 100
        assert seen["contrast"] >= 4.5
        assert seen["outside"] == 0
        assert seen["requests"] == 0
        dark = sum(map(int, re.findall(r"\d+", seen["background"]))) < 3 * 128
        assert dark == (scheme == "dark")
    # The policy holds; without it, the harness would have seen it broken.
    assert "/forbidden" not in asked
    assert forbidden["title"] == phone["title"]
    assert "/control" in asked
    assert control["title"] == "ran"
