"""The pages: links lead to something, every page is in the site's menu, and the commands they show have the options they name.

Runs no command: test_docs_commands.py does. What `python -m` starts is read for its options, not imported: that would need Ray
and torch.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from ddtree.deployments.commands.main import app

REPOSITORY = Path(__file__).parents[1]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [*DOCS, REPOSITORY / "README.md", REPOSITORY / "benchmarks/README.md"]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
CODE = re.compile(r"^```\w*\n(.*?)^```$|^    ([^\n]*)$|`([^`]+)`", re.M | re.S)  # fenced, indented, within a line
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.M)
COMMAND = re.compile(r"^(?:\w+=\S+ )*(ddtree [a-z]|python -m (?:benchmarks|ddtree)\b)")
OPTION = re.compile(r"--[a-z][a-z-]*")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command that the page shows, without what follows it on its line."""
    for block, indented, inline in CODE.findall(text.replace("\\\n", " ")):
        for line in [*block.splitlines(), indented, inline.replace("\n", " ")]:
            if COMMAND.match(line):
                yield shlex.split(re.split(r"\s#|[|;&]", line)[0])


def options(words: list[str]) -> set[str]:
    """What the command that begins so takes."""
    if words[0] == "ddtree":
        group = get_command(app)
        assert isinstance(group, TyperGroup)
        assert words[1] in group.commands, f"no command {words[1]}"
        return {"--help"} | {
            o for given in group.commands[words[1]].params for o in (*given.opts, *given.secondary_opts)
        }
    top, *below = words[2].split(".")
    module = REPOSITORY.joinpath(*below if top == "ddtree" else (top, *below))
    files = [module.with_suffix(".py"), module / "__main__.py"]
    if (module / f"{words[3]}.py" if len(words) > 3 else module).is_file():  # as `check` of the simulator
        files = [module / f"{words[3]}.py"]
    source = next((file for file in files if file.is_file()), None)
    assert source, f"no module {words[2]}"
    calls = [node for node in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(node, ast.Call)]
    adds = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {"--help"} | {str(given.value) for call in adds for given in call.args if isinstance(given, ast.Constant)}


@each_page
def test_links_lead_to_something(page: Path) -> None:
    for target in (a or b for a, b in LINK.findall(FENCE.sub("", page.read_text("utf-8")))):
        path, _, anchor = target.partition("#")
        if not path.startswith(("http://", "https://")):
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@each_page
def test_commands_have_the_options_they_are_given(page: Path) -> None:
    for words in commands(page.read_text("utf-8")):
        given = {option for word in words for option in OPTION.findall(word.partition("=")[0])}
        assert given <= options(words), f"{' '.join(words)}: no {', '.join(given - options(words))}"


def test_a_command_that_is_none_would_be_found() -> None:
    shown = "```bash\nddtree plan FILE --gpus 8   # not an option\n```\nor `python -m benchmarks.chaos FILE --kill 2`"
    plan, chaos = commands(shown)
    assert plan == ["ddtree", "plan", "FILE", "--gpus", "8"]
    assert "--gpus" not in options(plan) and "--gpu" in options(plan)
    assert "--kill" not in options(chaos) and "--kills" in options(chaos)


def test_every_page_is_in_the_menu() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    pages = re.findall(r"[\w./-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert sorted(pages) == sorted([*(page.name for page in DOCS), "benchmarks/README.md"])
