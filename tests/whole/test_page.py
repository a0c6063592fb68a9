"""The page in a real browser: what a person reads in each state, and that it stands still and asks nobody else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import need
from whole.browser import Browser
from whole.page_states import STATES, page_service

SIZE = (1280, 800)
# Names of what a screen reader steps through.
HEADINGS = "[...document.querySelectorAll('h1, h2')].map((one) => one.textContent)"
# The least contrast of text on its ground, by WCAG 2.2, over all that can be read.
CONTRAST = """
(() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color !== 'rgba(0, 0, 0, 0)') return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const texts = [...document.querySelectorAll('body *')].filter((node) =>
    [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()) && node.offsetWidth);
  return Math.min(...texts.map((node) => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()
"""
# Changes of the page in a while, but for the picture of time passing.
STILL = """
new Promise((done) => {
  let changes = 0;
  const watch = new MutationObserver((list) => { changes += list.filter((one) => !one.target.closest?.('#waits')).length; });
  watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  setTimeout(() => done(changes), 2500);
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(need("chromium")) as found:
        yield found


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots are kept: PICTURES names a folder that outlives the test."""
    return Path(os.environ.get("PICTURES") or tmp_path)


def test_the_page_tells_each_state_in_words_and_stands_still_between_them(
    browser: Browser, pictures: Path
) -> None:
    browser.screen(*SIZE)
    with page_service() as (service, url):
        browser.requests.clear()
        browser.open(url)
        browser.until("Idle", "#headline")
        for name, reach in STATES.items():
            browser.until(reach(service), "#headline")
            browser.until("job 2, ended" if name == "idle" else "E_EXPIRED")
            for scheme in ("light", "dark"):
                browser.screen(*SIZE, scheme)
                assert browser.value(CONTRAST) >= 4.5, (name, scheme)
                browser.picture(pictures / f"page-{name}-{scheme}.png")
            assert (pictures / f"page-{name}-dark.png").stat().st_size > 10_000
            if name == "idle":
                assert browser.value(STILL) == 0
                assert "Nobody waits." in browser.text("#line")
                assert "68 %" in browser.text("#acceptance")
                assert "4 rows" in browser.text("#widths")
            elif name == "running":
                assert browser.text("#sentence") == "20 jobs behind it."
                assert "tokens/s" in browser.text("#running")
                assert "decode" in browser.text("#running")
                assert browser.text("#line tbody tr:first-child").split()[:4] == ["1", "Job", "4", "next"]
                assert "and 12 more" in browser.text("#line")
        assert "the worker ended or crashed" in browser.text("#sentence")
        assert "absent" in browser.text("#worker")
        assert "exited: The worker ended or crashed." in browser.text("#faults")
        assert "goes on after" in browser.text("#line")
        service.broker.send(signal.SIGKILL)
        browser.until("The broker is gone", "#headline")
        assert "It last answered at" in browser.text("#sentence")
        assert browser.value("document.title") == "The broker is gone \u00b7 mtplx"
        assert browser.value("document.body.classList.contains('gone')") is True
    assert {request for request in browser.requests if not request.startswith((url, "data:"))} == set()
    assert browser.complaints == []


def test_the_page_can_be_read_without_eyes_and_on_a_telephone(browser: Browser) -> None:
    with page_service() as (_, url):
        browser.screen(360, 740)
        browser.open(url)
        browser.until("Idle", "#headline")
        browser.until("SmolLM2", "#worker")
        assert browser.value(HEADINGS) == [
            "Idle",
            "The line",
            "Last errors",
            "Worker",
            "Waits before a job ran",
            "Drafts accepted, by depth",
            "Forwards by width",
        ]
        assert browser.value("document.documentElement.lang") == "en"
        assert browser.value("document.querySelector('#headline').closest('[role=status]') !== null") is True
        # Nothing is wider than the screen.
        assert browser.value("document.documentElement.scrollWidth") <= 360
