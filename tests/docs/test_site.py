"""The site: its navigation, its reference, and the pictures that its pages name."""

import importlib
import re

import yaml
from blocks import DOCS, ROOT, pages

import meshpar

CONFIG = (ROOT / "mkdocs.yml").read_text()


def pages_in(nav: list) -> list[str]:
    found = []
    for item in nav:
        for value in item.values():
            found += pages_in(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_navigation_once():
    assert sorted(pages_in(yaml.safe_load(CONFIG)["nav"])) == sorted(str(p.relative_to(DOCS)) for p in pages())


def test_every_page_has_one_title():
    for path in pages():
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        assert len(re.findall(r"^# ", text, flags=re.M)) == 1, path.name


def test_the_reference_has_every_public_name():
    """What a page names must be the very object that `meshpar` exports."""
    named = []
    for path in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", path.read_text(), flags=re.M):
            module, _, attribute = name.rpartition(".")
            named.append(getattr(importlib.import_module(module), attribute))
    missing = [name for name in meshpar.__all__ if not any(getattr(meshpar, name) is each for each in named)]
    assert missing == ["AXES", "layers", "rules"]  # a tuple, and modules


def test_pictures_that_pages_name_are_there():
    made = set(re.findall(r'^    "(\w+)":', (ROOT / "tools" / "pictures.py").read_text(), flags=re.M))
    named = {name for path in pages() for name in re.findall(r"<!-- picture: (\w+) -->", path.read_text())}
    assert named == made
    for path in [*pages(), ROOT / "README.md"]:
        for image in re.findall(r"!\[[^]]+\]\(([^)]+)\)", path.read_text()):
            file = path.parent / image
            assert file.is_file(), f"{path.name}: {image}"
            assert file.stat().st_size < 200_000, image


def test_the_site_is_built_in_ci_with_nothing_from_the_network():
    assert "mkdocs build --strict" in (ROOT / ".ci" / "run").read_text()
    config = yaml.safe_load(CONFIG)
    assert config["theme"]["font"] is False
    assert not re.search(r"https?://", CONFIG)
