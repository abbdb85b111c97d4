"""The playground in a real browser: what a person does with it, and what it must never do."""

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.scripted import write_checkpoint
from tests.server.browser import Page, launched
from tests.server.running import running_server
from tools.page_example import COPY, page_example

EXAMPLES = Path(__file__).parents[2] / "examples" / "documents"
QUESTION = "Where does the person who signs travel requests live?"
ANSWER = (
    "The person who signs travel requests is Mira Tolland. The home of Mira Tolland is in Quorin."
)
STATIC = COPY.parent


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Opens pages, closes them, and fails if the browser complained about one."""
    pages = []

    def open_page(url, **options):
        pages.append(Page(browser, url, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
    assert [fault for page in pages for fault in page.faults] == []


@pytest.fixture
def page(server, open_page):
    return open_page(server.url).wait_ready()


def test_documents_in_another_order_are_not_recomputed(page, server):
    page.drop(EXAMPLES / "handbook.txt", EXAMPLES / "people.txt")
    assert page.titles == ["handbook.txt", "people.txt"]
    assert page.sources == ["new", "new"]

    assert page.ask(QUESTION) == ANSWER
    assert page.sources == ["computed", "computed"]
    computed = server.metric("looseleaf_document_tokens_total", source="computed")
    assert int(page.figure("Computed")) > 0
    assert page.figure("Reused") == "0"

    page.drag("handbook.txt", 1)
    assert page.titles == ["people.txt", "handbook.txt"]
    assert page.tab.is_visible("#order-changed")
    assert page.ask(QUESTION) == ANSWER
    assert page.sources == ["cached", "cached"]
    assert page.figure("Computed") == "0"
    assert server.metric("looseleaf_document_tokens_total", source="computed") == computed
    assert not page.tab.is_visible("#order-changed")


def test_documents_that_meet_can_be_computed_again_in_part(page):
    page.drop(EXAMPLES / "sites.txt", EXAMPLES / "letter.txt")
    page.tab.click("#open-options")
    assert page.tab.is_disabled("#ratio")
    page.tab.select_option("#fuse", "links")
    page.tab.fill("#ratio", "20")
    page.ask("What is the seal of Orlen Gate?")
    page.ask("What is the seal of Orlen Gate?")
    report = page.tab.evaluate("JSON.parse(document.getElementById('raw').textContent).looseleaf")
    assert report["policies"]["fuse"]["ratio"] == 0.2
    again = report["document_tokens_recomputed"]
    assert again > 0
    assert page.figure("Computed again") == str(again)
    # the first is exact where it stands
    assert page.sources == ["cached", "recomputed"]
    assert f"{again} computed again" in page.tab.locator(".leaf-facts").nth(1).inner_text()


def test_an_answer_is_shown_while_it_grows(page):
    page.drop(EXAMPLES / "handbook.txt")
    page.ask("Where is the archive?")
    # every piece of the stream became a text node of its own; a lagging page gets joined pieces
    assert page.tab.eval_on_selector("#answer-text", "answer => answer.childNodes.length") > 1


def test_the_strip_places_every_document_where_the_report_says(page):
    page.drop(EXAMPLES / "sites.txt", EXAMPLES / "letter.txt")
    page.ask("What is the seal of Orlen Gate?")
    report = page.tab.evaluate("JSON.parse(document.getElementById('raw').textContent)")
    described = page.tab.get_attribute("#strip", "aria-label")
    for entry in report["looseleaf"]["documents"]:
        assert f"{entry['title']}: {entry['tokens']} tokens at {entry['offset']}" in described
    shown = sum(map(int, re.findall(r"(\d+) tokens?\b", described)))
    assert shown == report["usage"]["prompt_tokens"]


def test_leaves_move_by_keyboard_and_keep_the_focus(page):
    page.drop(*(EXAMPLES / name for name in ("handbook.txt", "letter.txt", "people.txt")))
    focused = "document.activeElement.closest('.leaf')?.querySelector('.leaf-title').lastChild.data"
    page.tab.locator(".handle").first.focus()
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("ArrowDown")
    assert page.titles == ["letter.txt", "people.txt", "handbook.txt"]
    assert page.tab.evaluate(focused) == "handbook.txt"
    assert page.tab.inner_text("#spoken") == "handbook.txt is now 3 of 3"

    page.tab.get_by_label("Move people.txt up").focus()
    page.tab.keyboard.press("Enter")
    assert page.titles == ["people.txt", "letter.txt", "handbook.txt"]
    assert page.tab.evaluate(focused) == "people.txt"
    page.tab.get_by_label("Remove letter.txt").click()
    assert page.titles == ["people.txt", "handbook.txt"]


def test_a_drag_that_is_given_up_changes_nothing(page):
    page.drop(EXAMPLES / "handbook.txt", EXAMPLES / "letter.txt")
    edge = page.tab.locator(".handle").first.bounding_box()
    page.tab.mouse.move(edge["x"] + 9, edge["y"] + 20)
    page.tab.mouse.down()
    page.tab.mouse.move(edge["x"] + 9, edge["y"] + 130, steps=5)
    assert page.titles == ["letter.txt", "handbook.txt"]
    page.tab.keyboard.press("Escape")
    page.tab.mouse.up()
    assert page.titles == ["handbook.txt", "letter.txt"]


def test_pasted_text_becomes_a_document_and_is_shown_as_text(page):
    text = "<img src=x onerror=alert(1)> & <b>The archive</b> <|end|> is in the north wing."
    page.tab.click("#open-paste")
    page.tab.fill("#paste-title", "<i>notes</i>")
    page.tab.fill("#paste-text", text)
    page.tab.click("#paste button[type=submit]")
    assert page.titles == ["<i>notes</i>"]
    assert page.tab.text_content(".leaf pre") == text
    assert page.tab.locator(".leaf img, .leaf i, .leaf b").count() == 0
    page.ask("Where is the archive?")
    assert page.sources == ["computed"]


def test_the_example_is_one_click_away_and_answers(page):
    page.tab.click("#load-example")
    page.tab.wait_for_selector(".leaf:nth-child(4)")
    page.tab.click("#suggestions button:nth-child(2)")
    assert page.ask(page.tab.input_value("#question")) == "The archive is in the north wing."


def test_files_that_are_no_text_are_refused_by_name(page, tmp_path):
    binary, latin, empty = (tmp_path / name for name in ("a.bin", "latin.txt", "empty.txt"))
    binary.write_bytes(b"a\0b")
    latin.write_bytes("Müller".encode("latin-1"))
    empty.write_bytes(b" \n")
    page.drop(binary, latin, empty)
    assert page.titles == []
    assert [line.split()[0] for line in page.error.splitlines()] == [
        "a.bin",
        "latin.txt",
        "empty.txt",
    ]


def test_a_refusal_of_the_server_is_shown_and_the_next_question_works(page, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("A long report. " * 2_000)
    page.drop(long, EXAMPLES / "handbook.txt")
    page.tab.fill("#question", QUESTION)
    page.tab.click("#send")
    assert "tokens" in page.error
    # the browser itself notes every refused request; that is no fault of the page
    assert all("400" in fault for fault in page.faults)
    page.faults.clear()
    page.tab.get_by_label("Remove long.txt").click()
    assert page.ask("Where is the archive?") == "The archive is in the north wing."
    assert page.tab.is_hidden("#error")


TOOLS = '[{"name": "get_time", "parameters": {"type": "object", "properties": {}}}]'


@pytest.fixture(scope="module")
def tooled(tmp_path_factory):
    """A model that calls tools, thinks, and answers by what it is asked; texts are discovered."""
    folder = tmp_path_factory.mktemp("model") / "scripted"
    write_checkpoint(folder)
    with running_server(str(folder), "--dtype", "float32", "--reuse", "discover") as server:
        yield server


def test_calls_thoughts_and_discovered_texts_are_shown(tooled, open_page):
    page = open_page(tooled.url).wait_ready()
    page.tab.click("#open-options")
    page.tab.fill("#tools", TOOLS)
    page.ask("What time is it?")
    assert page.tab.locator("#calls li").all_inner_texts() == ["get_time{}"]
    assert page.tab.is_hidden("#thoughts")

    page.tab.fill("#tools", "")
    page.tab.select_option("#thinking", "on")
    assert page.ask("Where is the archive?") == "The archive is in the north wing."
    assert page.tab.inner_text("#thoughts-text") == "Let me see!"
    assert page.tab.is_hidden("#calls")

    notes = "\n".join(f"Line {number} of the notes is here." for number in range(60))
    page.tab.select_option("#thinking", "")
    page.ask(f"{notes}\nWhere is it?")
    page.ask(f"Once more:\n{notes}\nWhere is it?")
    assert int(page.figure("Discovered").replace(",", "")) > 128


def test_tools_that_are_no_json_are_refused_by_the_page(tooled, open_page):
    page = open_page(tooled.url).wait_ready()
    page.tab.click("#open-options")
    page.tab.fill("#tools", "get_time")
    page.tab.fill("#question", "What time is it?")
    page.tab.click("#send")
    assert "no JSON" in page.error


def go_on(route):
    """Asks the server for an answer that does not end by itself."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def test_an_answer_can_be_stopped(page):
    page.tab.route("**/v1/chat/completions", go_on)
    page.tab.click("#open-options")
    page.tab.fill("#max-tokens", "2000")
    page.tab.fill("#temperature", "2")
    page.tab.fill("#question", "Go on")
    page.tab.click("#send")
    page.tab.click("#stop")
    page.tab.wait_for_selector("#send:enabled")
    assert page.tab.inner_text("#answer-end") == "Stopped."


def stream_of(*events, ends=True):
    """The body of a stream with these events."""
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + ("data: [DONE]\n\n" if ends else "")


def answer_with(page, body):
    """Has every chat answered with this body, in place of the server's."""
    headers = {"Content-Type": "text/event-stream"}
    page.tab.route("**/v1/chat/completions", lambda r: r.fulfill(body=body, headers=headers))


PIECE = {"choices": [{"index": 0, "delta": {"content": "The archive"}}]}


@pytest.mark.parametrize(
    ("events", "ends", "message"),
    [
        ([PIECE, {"error": {"message": "the deadline has passed"}}], True, "deadline has passed"),
        ([PIECE], False, "ended before the answer did"),
    ],
)
def test_an_answer_that_breaks_off_says_so_and_keeps_what_came(page, events, ends, message):
    answer_with(page, stream_of(*events, ends=ends))
    page.tab.fill("#question", "Where is the archive?")
    page.tab.click("#send")
    assert message in page.error
    assert page.tab.inner_text("#answer-text").strip() == "The archive"
    assert page.tab.is_enabled("#send")


def test_every_source_has_a_colour_and_a_word_of_its_own(page):
    sources = ["cached", "computed", "awaited", "recomputed", "loaded"]
    for source in sources:
        page.tab.click("#open-paste")
        page.tab.fill("#paste-title", source)
        page.tab.fill("#paste-text", f"A document that is {source}.")
        page.tab.click("#paste button[type=submit]")
    documents = [
        {"title": s, "tokens": 10, "offset": 2 + 10 * n, "source": s, "seconds": 0.5}
        for n, s in enumerate(sources)
    ]
    report = {
        "documents": documents,
        **dict.fromkeys(("text_tokens", "text_tokens_cached"), 0),
        **dict.fromkeys(("document_tokens_reused", "document_tokens_computed"), 0),
        "times": {"queued": 0, "first_token": 0.1, "total": 0.2},
    }
    usage = {"prompt_tokens": 60, "completion_tokens": 3}
    answer_with(page, stream_of(PIECE, {"choices": [], "usage": usage, "looseleaf": report}))
    page.ask("What is what?")
    assert page.sources == sources
    words = page.tab.locator(".leaf .badge").all_inner_texts()
    assert len(set(words)) == len(sources)
    paint = "edges => edges.map((edge) => getComputedStyle(edge).backgroundColor)"
    # the colours fade in
    page.tab.emulate_media(reduced_motion="reduce")
    assert len(set(page.tab.eval_on_selector_all(".handle", paint))) == len(sources)
    assert page.tab.locator("#legend li").count() == len(sources)


def test_a_server_with_keys_makes_the_page_ask_for_one(open_page, tmp_path):
    with running_server(keys={"team": "a-secret-key"}) as server:
        page = open_page(server.url)
        assert "API key" in page.error
        assert page.tab.inner_text("#server") == "API key needed"
        page.tab.fill("#api-key", "wrong")
        page.tab.keyboard.press("Tab")
        page.tab.wait_for_selector("#server[data-state=locked]")
        page.tab.fill("#api-key", "a-secret-key")
        page.tab.keyboard.press("Tab")
        page.wait_ready()
        page.faults.clear()
        page.drop(EXAMPLES / "handbook.txt")
        assert page.ask("Where is the archive?") == "The archive is in the north wing."
        assert page.tab.evaluate("localStorage.length + ' ' + document.cookie") == "1 "


def test_the_page_asks_nobody_but_its_server(page, server):
    page.tab.click("#load-example")
    page.ask(QUESTION)
    assert {urlsplit(url).netloc for url in page.asked} == {urlsplit(server.url).netloc}
    sources = "".join(path.read_text("utf-8") for path in STATIC.iterdir())
    assert set(re.findall(r"https?://[^\s\"')]+", sources)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(open_page, server, scheme):
    page = open_page(server.url, color_scheme=scheme).wait_ready()
    page.tab.click("#load-example")
    page.ask(QUESTION)
    page.ask(QUESTION)
    assert page.tab.evaluate(FAINT_TEXT) == []


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_nothing_is_wider_than_the_screen(open_page, server, width):
    page = open_page(server.url, viewport={"width": width, "height": 800}).wait_ready()
    page.tab.click("#load-example")
    page.ask(QUESTION)
    page.ask(QUESTION)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page):
    page.tab.click("#load-example")
    page.tab.wait_for_selector(".leaf:nth-child(4)")
    page.tab.click("#open-options")
    assert page.tab.evaluate(NAMELESS_CONTROLS) == []


def test_the_colours_that_were_chosen_outlast_a_reload(page):
    page.tab.select_option("#theme", "dark")
    dark = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    page.tab.reload()
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    page.tab.select_option("#theme", "light")
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_the_example_of_the_page_is_that_of_the_repository():
    assert COPY.read_text("utf-8") == page_example(), "run python tools/page_example.py"


NAMELESS_CONTROLS = """
() => [...document.querySelectorAll("button, input, select, textarea, summary")]
  .filter((control) => control.checkVisibility())
  .filter((control) => control.tabIndex < 0
    || !(control.ariaLabel || control.textContent.trim() || control.labels?.length))
  .map((control) => control.outerHTML)
"""

# visible words with less contrast than WCAG's 4.5:1 to the colour behind them; colours are painted
# on a canvas to read them, for they come as color-mix() and light-dark() made them
FAINT_TEXT = """
() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = colour;
    brush.fillRect(0, 0, 1, 1);
    return [...brush.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return rgba(colour)[3] === 255 ? colour : behind(element.parentElement);
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility()) continue;
    if (element.closest(":disabled, .visually-hidden, template")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push(`${element.textContent.trim()}: ${contrast.toFixed(2)}`);
  }
  return faint;
}
"""
