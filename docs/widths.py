"""Looks at every page of the built site in Chromium, as wide as two laptops, and names what is wider than its column.

    make docs && python docs/widths.py [site]         exit code 1 where a table or a block of code scrolls sideways

Needs chromium in the path. The pages are shown in frames of 1280 x 800 and of 1366 x 768 pixels, one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

SIZES = ((1280, 800), (1366, 768))
WIDE = "pre > code, .md-typeset__scrollwrap, .md-content, svg, img"
LOOK = """<!doctype html><body style="margin:0"><pre id="found"></pre><script>
const pages = PAGES, found = {};
async function look() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style = "width:WIDTHpx;height:HEIGHTpx;border:0";
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    await new Promise(done => setTimeout(done, 300));  // the theme wraps its tables after loading
    const all = [...frame.contentDocument.querySelectorAll("SELECTOR")];
    found[page] = all.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
      .map(e => e.tagName + " " + e.scrollWidth + " > " + e.clientWidth + ": " + e.textContent.trim().slice(0, 70));
    frame.remove();
  }
  document.getElementById("found").textContent = "FOUND" + JSON.stringify(found) + "END";
}
look();
</script>"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server, on loopback, of the folder."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def too_wide(site: Path, chromium: str, width: int, height: int, seconds: float = 300) -> dict[str, list[str]]:
    """page -> what is wider than its column, for every page of the site."""
    pages = sorted(f"/{page.relative_to(site)}" for page in site.rglob("index.html"))
    script = LOOK.replace("PAGES", json.dumps(pages)).replace("SELECTOR", WIDE)
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "site"
        shutil.copytree(site, shown)
        (shown / "look.html").write_text(script.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
        with served(shown) as address:
            done = subprocess.run(
                [
                    chromium,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    f"--user-data-dir={folder}/profile",
                    f"--window-size={width},{height}",
                    "--virtual-time-budget=600000",
                    "--dump-dom",
                    f"{address}/look.html",
                ],
                capture_output=True,
                text=True,
                timeout=seconds,
            )
    told = re.search(r"FOUND(.*)END</pre>", done.stdout, re.S)
    if told is None:
        raise RuntimeError(f"Chromium did not get through the pages:\n{done.stderr[-2000:]}")
    found: dict[str, list[str]] = json.loads(html.unescape(told[1]))
    return found


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or not (site / "index.html").exists():
        sys.exit(f"widths.py: it needs chromium in the path, and a site in '{site}' (make docs)")
    wider = 0
    for width, height in SIZES:
        found = too_wide(site, chromium, width, height)
        for page, wide in found.items():
            for what in wide:
                print(f"{page}: {what}")
        print(f"{len(found)} pages, {sum(map(len, found.values()))} wider than their column at {width} x {height}")
        wider += sum(map(len, found.values()))
    sys.exit(wider > 0)


if __name__ == "__main__":
    main()
