"""A headless Chromium for tests: the one on the PATH, never a downloaded one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# builds the files inside the page and drops them on it, as a file manager would
DROP = """
(files) => {
  const transfer = new DataTransfer();
  for (const [name, bytes] of files) transfer.items.add(new File([new Uint8Array(bytes)], name));
  for (const type of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(
      new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}
"""


def find_chromium() -> str:
    """The browser's path; skips the test without one, or fails it where one is required.

    REQUIRE_BROWSER=1 requires it, as CI does: a test that is skipped unseen tests nothing.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    message = "no Chromium on the PATH: install Debian's package chromium"
    if os.environ.get("REQUIRE_BROWSER") == "1":
        pytest.fail(message)
    return pytest.skip(message)


@contextmanager
def launched() -> Iterator:
    """A browser that is closed at the end."""
    executable = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # the sandbox needs rights that containers do not give, and root never has
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """The playground as a person uses it. ``faults`` collects what the browser complained about,
    ``asked`` the address of everything that the page loaded."""

    def __init__(self, browser, url: str, **options) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, **options}
        )
        self.tab = self.context.new_page()
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("console", self._listen)
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(url)

    def _listen(self, message) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def wait_ready(self) -> "Page":
        """Waits until the page has found the server."""
        self.tab.wait_for_selector("#server[data-state=ready]")
        return self

    def drop(self, *paths: Path) -> None:
        """Drops files on the page and waits until they are leaves, or refused."""
        before = len(self.titles)
        files = [[path.name, list(path.read_bytes())] for path in paths]
        self.tab.evaluate(DROP, files)
        self.tab.wait_for_selector(
            f".leaf:nth-child({before + len(paths)}), #error:not([hidden])", state="visible"
        )

    @property
    def titles(self) -> list[str]:
        """Titles of the documents in their order."""
        marked = self.tab.locator(".leaf-title").all()
        return [leaf.evaluate("title => title.lastChild.textContent") for leaf in marked]

    @property
    def sources(self) -> list[str]:
        """Where each document came from, as its leaf shows it."""
        return [leaf.get_attribute("data-source") for leaf in self.tab.locator(".leaf").all()]

    @property
    def error(self) -> str:
        """The message that is shown."""
        self.tab.wait_for_selector("#error:not([hidden])")
        return self.tab.inner_text("#error-text")

    def ask(self, question: str) -> str:
        """Asks, waits for the report of the answer, and returns the answer."""
        answered = self.tab.locator("#runs tr").count()
        self.tab.fill("#question", question)
        self.tab.click("#send")
        self.tab.wait_for_selector(f"#runs tr:nth-child({answered + 1})", state="attached")
        return self.tab.inner_text("#answer-text").strip()

    def figure(self, name: str) -> str:
        """The number that the report shows under a name."""
        box = self.tab.locator("#figures > div", has=self.tab.get_by_text(name, exact=True))
        return box.locator("dd").evaluate("value => value.firstChild.textContent")

    def drag(self, title: str, places: int) -> None:
        """Drags a leaf by its edge, so many places down (up if negative)."""
        leaf = self.tab.locator(".leaf", has_text=title)
        edge = leaf.locator(".handle").bounding_box()
        height = leaf.evaluate("leaf => leaf.offsetHeight + 10")
        x, y = edge["x"] + edge["width"] / 2, edge["y"] + edge["height"] / 2
        self.tab.mouse.move(x, y)
        self.tab.mouse.down()
        self.tab.mouse.move(x, y + places * height, steps=10)
        self.tab.mouse.up()
