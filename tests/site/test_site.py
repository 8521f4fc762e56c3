# SPDX-License-Identifier: Apache-2.0
"""The built site in a browser: no text is cut off, no word of code is broken, and the search finds pages.

`make docs-check` builds the site first. Chromium measures every page, in a frame of each
width. Without Chromium or the site, the tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SITE = HERE.parents[1] / "build" / "site"
WIDTHS = (400, 800, 1400)
WORDS = "ulysses"
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Handler(SimpleHTTPRequestHandler):
    """Serve the site, and receive what the page that measures it found."""

    def __init__(self, *arguments: Any, plan: bytes, done: threading.Event, results: dict[str, Any]) -> None:
        self.plan, self.done, self.results = plan, done, results
        super().__init__(*arguments, directory=str(SITE))

    def do_GET(self) -> None:
        own = {"/measure.html": (HERE / "measure.html").read_bytes, "/plan.json": lambda: self.plan}
        if self.path not in own:
            return super().do_GET()
        body = own[self.path]()
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(self.path))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.results |= json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return what a browser measured of all pages."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"there is no {NAMES[0]}")
    if not (SITE / "index.html").exists():
        pytest.skip(f"there is no {SITE}: make docs builds it")
    pages = [f"/{path.relative_to(SITE)}" for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"]
    plan = json.dumps({"pages": pages, "widths": WIDTHS, "words": WORDS}).encode()
    done, results = threading.Event(), dict[str, Any]()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, plan=plan, done=done, results=results)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--window-size=1400,900", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
        command += ["--remote-debugging-port=0"]  # without it, headless Chromium ends once the page is loaded
        command += [f"http://127.0.0.1:{server.server_port}/measure.html"]
        with open(tmp_path_factory.mktemp("log") / "log", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                if not done.wait(120):
                    log.seek(0)
                    pytest.fail(f"{browser} reported nothing within 120 s:\n{log.read()[-2000:]}")
            finally:
                process.terminate()
                process.wait()
                server.shutdown()
    assert results["error"] is None, results["error"]
    assert len(results["results"]) == len(pages) * len(WIDTHS)
    yield results


def found(measured: dict[str, Any], what: str) -> list[tuple[str, int, str]]:
    pages = measured["results"]
    assert sum(page[what]["count"] for page in pages) > 100
    return [(page["path"], page["width"], text) for page in pages for text in page[what]["found"]]


def _lines(places: list[tuple[str, int, str]]) -> str:
    return "\n".join(f"{path} at {width}: {text}" for path, width, text in places)


def test_no_block_of_code_is_cut_off(measured: dict[str, Any]) -> None:
    assert not (cut := found(measured, "cut")), _lines(cut)


def test_no_word_of_inline_code_is_broken(measured: dict[str, Any]) -> None:
    assert not (broken := found(measured, "broken")), _lines(broken)


def test_no_text_is_wider_than_the_window(measured: dict[str, Any]) -> None:
    assert not (wide := found(measured, "wide")), _lines(wide)


def test_search_finds_a_page(measured: dict[str, Any]) -> None:
    assert any(WORDS in link or "attention" in link for link in measured["found"]), measured["found"]
