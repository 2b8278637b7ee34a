"""The pages of the documentation are programs: all of their blocks run, and print what the pages show."""

import pytest
import yaml
from blocks import DOCS, ROOT, blocks_of, is_shown, pages, run_page
from shells import calls_of, check_call

import meshpar

PAGES = [str(path.relative_to(DOCS)) for path in pages()]
ALL = [block for path in pages() for block in blocks_of(path)]
SHELL = [block for block in ALL if block.language == "sh"]


def test_what_is_not_run_is_listed_here():
    """What cannot be run needs a package that we cannot have in the tests."""
    assert {(block.page, block.reason) for block in ALL if block.reason} == {
        ("docs/howto/credit.md", "CREDIT is not installed here"),
        ("docs/howto/shardtensor.md", "PhysicsNeMo is not installed here"),
    }
    for block in ALL:
        if block.language == "python":
            compile(block.code, block.name, "exec")


def test_every_block_is_of_a_kind_that_the_tests_run():
    assert {block.language for block in ALL} == {"python", "sh", "yaml"}


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.page == f"docs/{p}" for b in ALL)])
def test_a_page_prints_what_it_shows(page):
    for block, printed in run_page(DOCS / page):
        assert is_shown(block, printed), f"{block.name}: it prints\n{printed}"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_commands_are_there_and_take_their_options(block, tmp_path, monkeypatch):
    calls = calls_of(block, tmp_path)
    assert calls
    for call in calls:
        check_call(call, monkeypatch)


def test_configurations_are_read():
    found = [meshpar.MeshSpec.from_config(yaml.safe_load(b.code)) for b in ALL if b.language == "yaml"]
    assert [spec.domain for spec in found] == [4, 4]


def test_a_page_that_shows_something_else_is_seen(tmp_path, monkeypatch):
    """The comparison itself: another number, a missing line, and a print that the page leaves out."""
    shown = "```python\nprint(1)\nprint(2)\n```\n\n```text\n{}\n```\n"
    path = DOCS / "howto" / "rollouts.md"
    for text, right in (("1\n2", True), ("1\n3", False), ("1", False), ("1\n...", True)):
        page = tmp_path / "page.md"
        page.write_text(shown.format(text))
        monkeypatch.setattr("blocks.ROOT", tmp_path)
        (block,) = blocks_of(page)
        assert is_shown(block, "1\n2\n") is right
    monkeypatch.setattr("blocks.ROOT", ROOT)
    assert not is_shown(blocks_of(path)[0], "something\n")
