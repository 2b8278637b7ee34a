"""Take the screenshots of the documentation: `python tools/screenshots.py SITE`, with SITE a built site.

A headless Chromium opens pages of the site on localhost, and pages that hold one table or picture alone, and writes
PNG files to `docs/images`. `--all FOLDER` also takes every page of the site, on a wide and on a narrow window, in light
and dark, to be looked at. Chromium is Debian's (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import functools
import http.server
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_FRAME = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 12px; font: 13px sans-serif; color: #222; background: #fff; }}
table {{ border-collapse: collapse; margin-bottom: 10px; }} caption {{ text-align: left; padding: 4px 0; color: #555; }}
th, td {{ padding: 3px 10px; white-space: nowrap; border-bottom: 1px solid #ddd; }}
th {{ background: #f3f4f8; }} p {{ margin: 4px 0; }}
</style>{body}"""


def tables() -> dict[str, tuple[str, int, int]]:
    """Make what is photographed by itself: for each name its HTML, and the size of the window."""
    from torch import nn, zeros

    import meshpar

    def small() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.GroupNorm(8, 128), nn.GELU()),
            *(nn.ConvTranspose2d(128, 64, 2, stride=2), nn.GELU(), nn.Conv2d(64, 3, 3, padding=1)),
        )

    plan = meshpar.plan(small(), "data=4,domain=8", (1, 3, 720, 1440))
    found = meshpar.search(small(), (1, 3, 720, 1440), devices=16, memory="16GB")
    run = meshpar.simulate("domain=4", nn.Sequential(*small()[:5]), zeros(1, 3, 37, 48))
    picture = meshpar.show("data=2,domain=4", (2, 3, 37, 49), halo=3)
    return {
        "plan": (plan._repr_html_(), 1000, 480),
        "search": (found._repr_html_(), 900, 300),
        "explain": (run.ranks[1].explanation._repr_html_(), 1000, 320),
        "show": (picture.svg(), 800, 450),
    }


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on localhost; give its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def photograph(address: str, file: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Open an address in a new browser and write what it shows."""
    with tempfile.TemporaryDirectory() as home:
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        command = ["chromium", *FLAGS, *scheme, f"--user-data-dir={home}", f"--window-size={width},{height}"]
        command += ["--force-device-scale-factor=1", "--virtual-time-budget=2500", f"--screenshot={file}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def crop(file: Path) -> None:
    """Cut off what is white to the right and below."""
    from PIL import Image, ImageChops

    with Image.open(file) as opened:
        image = opened.convert("RGB")
    seen = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    if seen is not None:
        image.crop((0, 0, min(seen[2] + 12, image.width), min(seen[3] + 12, image.height))).save(file, optimize=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--all", type=Path, help="take every page as well, into this folder")
    given = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as address:
        for name, (body, width, height) in tables().items():
            (Path(folder) / f"{name}.html").write_text(_FRAME.format(body=body))
            photograph(f"{address}/{name}.html", IMAGES / f"{name}.png", width, height)
            crop(IMAGES / f"{name}.png")
    if given.all:
        given.all.mkdir(parents=True, exist_ok=True)
        pages = sorted(p.relative_to(given.site) for p in given.site.rglob("*.html") if p.name != "404.html")
        with served(given.site) as address:
            for page, (width, dark) in itertools.product(pages, ((1280, False), (420, True))):
                name = f"{page.as_posix().replace('/', '-').removesuffix('.html')}-{width}.png"
                photograph(f"{address}/{page.as_posix()}", given.all / name, width, 1800, dark=dark)
    print(json.dumps({p.name: p.stat().st_size for p in sorted(IMAGES.glob("*.png"))}))


if __name__ == "__main__":
    main()
