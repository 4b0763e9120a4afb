"""The page in a real Chromium, before the running service: it answers, draws what was verified, says what went wrong, and can be
used without sight, mouse or a large screen. Without Playwright or a Chromium these tests are skipped."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..api.served import LocalEngine, serving

pytest.importorskip("playwright", reason="no Playwright: pip install -e '.[test]'")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SWITCHES = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
PATIENCE_MS = 90_000  # for an answer on busy cores
WIDTHS = (360, 768, 1440)
QUESTION = "Count from one to ten in words."

expect.set_options(timeout=PATIENCE_MS)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{name}" for name in SWITCHES.split()])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server in a context of its own. Nothing of it asks anybody else, breaks, or is kept by its policy."""
    asked, complaints, contexts, servers = set[str](), list[str](), list[BrowserContext](), ["data:"]

    def visit(url: str, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        servers.append(f"{url}/")
        page = contexts[-1].new_page()
        page.on("request", lambda request: asked.add(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Security Policy" in said.text else None)
        page.goto(url)
        return page

    yield visit
    assert not [url for url in asked if not url.startswith(tuple(servers))]
    assert not complaints
    for context in contexts:
        context.close()


def ask(page: Page, question: str = QUESTION, **sampling: object) -> None:
    """With these fields of the sampling."""
    settings = {"Max tokens": 24, "Budget": 16} | sampling
    button = page.get_by_role("button", name="Sampling")
    button.click()
    for label, value in settings.items():
        page.get_by_role("spinbutton", name=label).fill(str(value))
    button.click()
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def finished(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def findings(page: Page, width: int) -> list[str]:
    """What axe objects to, of whatever impact, in a window so wide."""
    page.set_viewport_size({"width": width, "height": 800})
    return [f"{one['impact']} {one['id']}: {one['nodes'][0]['html']}" for one in Axe().run(page).response["violations"]]


def test_an_answer_and_its_trees(server: str, visit: Open) -> None:
    page = visit(server)
    expect(page).to_have_title("ddtree playground")
    ask(page)
    finished(page)
    answer = page.get_by_role("region", name="Speculative answer")
    expect(answer.locator(".text")).not_to_be_empty()

    slider = page.get_by_role("slider", name="Round")
    last = int(slider.get_attribute("max") or 0)
    assert 1 < last < 23, "rounds brought several tokens"
    committed = ""
    nodes = []
    for number in range(last + 1):
        slider.fill(str(number))
        expect(page.get_by_role("heading", name=re.compile(f"Round {number} of {last}"))).to_be_visible()
        label = page.locator(".committed").get_attribute("aria-label") or ""
        committed += label.removeprefix("Committed: ")
        nodes.append(page.get_by_role("treeitem").count())
        assert page.locator(".node.bonus").count() == 1 or number == last
        assert (
            page.locator(".node.accepted").count() + page.locator(".node.bonus").count()
            == page.locator(".committed code").count()
        )
    assert committed.startswith(answer.locator(".text").inner_text()[:40])
    assert nodes[0] == 1 and max(nodes) == 18, "the root, 16 nodes and the bonus token"
    page.get_by_role("button", name="Previous round").click()
    expect(page.get_by_role("heading", name=f"Round {last - 1} of")).to_be_visible()


def test_a_tree_by_keyboard(server: str, visit: Open) -> None:
    page = visit(server)
    ask(page)
    finished(page)
    page.get_by_role("slider", name="Round").fill("1")
    root = page.get_by_role("treeitem").first
    root.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_attribute("aria-level", "2")
    expect(page.locator(".detail")).to_contain_text("given its path")
    page.keyboard.press("End")
    expect(page.locator(":focus")).to_have_class(re.compile("bonus"))
    page.keyboard.press("Home")
    expect(page.locator(":focus")).to_have_attribute("aria-level", "1")


def test_side_by_side_gives_the_same_tokens(server: str, visit: Open) -> None:
    page = visit(server)
    page.get_by_label("Side by side").check()
    ask(page, Temperature=0.8)
    expect(page.get_by_text(re.compile(r"the same \d+ tokens$"))).to_be_visible()
    texts = [
        page.get_by_role("region", name=f"{kind} answer").locator(".text").inner_text()
        for kind in ("Speculative", "Plain")
    ]
    assert texts[0] == texts[1] != ""
    expect(page.get_by_role("region", name="Plain answer").locator(".figures")).to_contain_text(
        re.compile(r"1\.00\s*tokens/round")
    )


def test_a_bad_request_says_why(server: str, visit: Open) -> None:
    page = visit(server)
    ask(page, **{"Top p": 2})
    expect(page.get_by_role("alert")).to_contain_text("top_p")
    page.get_by_role("button", name="Sampling").click()
    page.get_by_role("spinbutton", name="Top p").fill("0.9")
    page.get_by_role("button", name="Try again").click()
    finished(page)
    expect(page.locator(".text").last).not_to_be_empty()


def test_a_server_that_is_gone_is_said_to_be(visit: Open, tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    with serving(engine) as url:
        page = visit(url)
        engine.go.clear()  # the answer is awaited when the server goes
        ask(page)
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_visible()  # with what the server said last, if anything
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert").last).to_contain_text("does not answer")
    page.get_by_role("button", name="Engine").click()
    expect(page.get_by_role("region", name="Engine")).to_contain_text("does not answer")


def test_four_tabs_at_once(server: str, visit: Open) -> None:
    pages = [visit(server) for _ in range(4)]
    for page in pages:
        ask(page)
    for page in pages:
        finished(page)
    texts = {page.locator(".text").inner_text() for page in pages}
    assert len(texts) == 1 and texts != {""}


def test_the_engine_is_asked_only_while_it_is_shown(server: str, visit: Open) -> None:
    page = visit(server)
    expect(page.get_by_role("heading", level=1)).to_contain_text("smollm2")  # so much it asks at once
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server)))
    page.wait_for_timeout(2500)
    assert not asked
    with page.expect_response("**/metrics"), page.expect_response("**/health"):
        page.get_by_role("button", name="Engine").click()
    engine = page.get_by_role("region", name="Engine")
    for word in ("connected", "running", "in use", "verify"):
        expect(engine).to_contain_text(word)
    page.get_by_role("button", name="Engine").click()
    seen = len(asked)
    page.wait_for_timeout(2500)
    assert len(asked) == seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible(server: str, visit: Open, scheme: str) -> None:
    """At three widths; the smallest shows one half at a time."""
    page = visit(server, color_scheme=scheme, reduced_motion="reduce")
    found = {f"empty, {width}": findings(page, width) for width in WIDTHS}
    page.get_by_label("Side by side").check()
    ask(page, **{"Max tokens": 12})
    expect(page.locator(".verdict")).to_be_visible()
    page.get_by_role("slider", name="Round").fill("1")
    page.get_by_role("button", name="Engine").click()
    page.get_by_role("button", name="Sampling").click()
    expect(page.get_by_role("region", name="Engine")).to_contain_text("in use")
    found |= {f"answered, {width}": findings(page, width) for width in WIDTHS}
    page.set_viewport_size({"width": WIDTHS[0], "height": 800})
    page.get_by_role("button", name="Tree", exact=True).click()
    found["its tree"] = findings(page, WIDTHS[0])
    assert not any(found.values()), found


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_a_small_screen(server: str, visit: Open, width: int) -> None:
    page = visit(server, viewport={"width": width, "height": 740})
    ask(page, **{"Max tokens": 12})
    finished(page)
    if width == 360:
        page.get_by_role("button", name="Tree", exact=True).click()
    expect(page.get_by_role("tree")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
