"""Look at a built site with a browser: `python tools/check_site.py SITE`.

Each page is opened on a wide and on a narrow window. It must have one h1 and a title, and must not be wider than the
window. All that it links to within the site must be there, anchors included; nothing may be asked of another host.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from screenshots import FLAGS, served

_LOOK = """<!doctype html><meta charset="utf-8"><body><script>
const pages = PAGES, widths = [1280, 420], found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  const loaded = new Promise((done) => (frame.onload = done));
  frame.src = page;
  document.body.append(frame);
  await loaded;
  await new Promise((done) => setTimeout(done, 60));
  const doc = frame.contentDocument, wrong = [];
  if (doc.querySelectorAll("h1").length !== 1) wrong.push(`${doc.querySelectorAll("h1").length} h1`);
  if (!doc.title) wrong.push("no title");
  if (!doc.querySelector("nav.md-nav a[href]")) wrong.push("no navigation");
  if (doc.documentElement.scrollWidth > width) wrong.push(`${doc.documentElement.scrollWidth} wide on ${width}`);
  for (const code of doc.querySelectorAll(".md-content pre, .md-content .output, .md-content .picture")) {
    const box = code.getBoundingClientRect();
    if (box.right > width + 1) wrong.push(`a block of ${code.textContent.slice(0, 30).trim()} runs out on ${width}`);
  }
  if (wrong.length) found.push([page, width, wrong]);
  frame.remove();
}
(async () => {
  for (const width of widths) for (const page of pages) await look(page, width);
  document.body.innerHTML = "<pre id=found>" + JSON.stringify({looked: pages.length, found}) + "</pre>";
})();
</script></body>"""


def looked_at(site: Path) -> dict[str, object]:
    """Open all pages in a browser; give what is wrong with them."""
    pages = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html") if p.name != "404.html")
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "site"
        shutil.copytree(site, folder)
        (folder / "look.html").write_text(_LOOK.replace("PAGES", json.dumps(pages)))
        with served(folder) as address:
            command = [
                "chromium",
                *FLAGS,
                f"--user-data-dir={home}/browser",
                "--virtual-time-budget=60000",
                "--dump-dom",
            ]
            dom = subprocess.run(
                [*command, f"{address}/look.html"], check=True, capture_output=True, text=True, timeout=170
            )
    told = re.search(r'<pre id="found">(.*?)</pre>', dom.stdout, flags=re.S)
    assert told is not None, dom.stdout[-2000:]
    return json.loads(html.unescape(told[1]))  # type: ignore[no-any-return]


def dead_links(site: Path) -> list[str]:
    """List links and sources that lead nowhere within the site, or that a page asks of another host by itself."""
    wrong = []
    texts = {p: p.read_text() for p in site.rglob("*.html")}
    anchors = {p: set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text)) for p, text in texts.items()}
    for page, text in texts.items():
        if page.name == "404.html":
            continue
        for tag, name, link in re.findall(r'<(\w+)[^>]*?\s(href|src)="?([^"\s>]+)', text):
            link = html.unescape(link)
            if re.match(r"(https?:)?//", link):
                if name == "src" or tag == "link":
                    wrong.append(f"{page.relative_to(site)}: {tag} asks {link}")
                continue
            if re.match(r"(data|mailto|javascript):", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{page.relative_to(site)}: {link}")
            elif anchor and target in anchors and anchor not in anchors[target]:
                wrong.append(f"{page.relative_to(site)}: no anchor {link}")
    return wrong


def main() -> int:
    """Print what is wrong; give the code of the process."""
    site = Path(sys.argv[1]).resolve()
    dead, seen = dead_links(site), looked_at(site)
    print(json.dumps({"dead": dead, **seen}, indent=1))
    return 1 if dead or seen["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
