"""The HTML page: built by the script from a small folder of results, then read, and clicked in a headless browser."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import append_rows
from report.html.page import from_markdown

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "window-size=1400,1000"),
)
TIMES = {  # ms of fused3s and fused3s_paper; as text they have another order: "10", "100", "9.5"
    "cora": (9.5, 19),
    "pubmed": (100, 50),
    "reddit": (10.25, 41),
    "superpixel-bsds500": (1000, 8000),
}
OOM = "no memory for <b>this</b> & that"
PNG = bytes.fromhex(  # 1 x 1 pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100"
    "c9fe92ef0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a few rows, as the script writes it."""
    folder = tmp_path_factory.mktemp("results")
    rows = [
        row(name, series, milliseconds, data_sha256=f"hash of {name}")
        for name, times in TIMES.items()
        for series, milliseconds in zip(("fused3s", "fused3s_paper"), times, strict=True)
    ]
    rows += [row("cora", "pyg", None, "oom", reason=OOM, dtype="float32")]
    rows += [row("cora", "fused3s", 300.0, metric="peak_memory", unit="MiB")]
    append_rows(folder / "kernels.csv", rows)
    output = folder / "own" / "report.html"
    done = CliRunner().invoke(load_script("html_report").app, ["--results", str(folder), "--output", str(output)])
    assert done.exit_code == 0, done.output or done.exception
    return output


class Elements(HTMLParser):
    """All elements with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, *tags):
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def elements(page):
    return Elements(page.read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(elements, page):
    assert not elements.all("iframe", "object", "embed", "base")
    loaded = [one[name] for _, one in elements.found for name in ("src", "srcset", "data", "action") if name in one]
    assert loaded
    assert all(source.startswith("data:image/png;base64,") for source in loaded)
    assert [one["href"] for one in elements.all("link")] == ["data:,"]
    (style,) = re.findall(r"<style>(.*?)</style>", page.read_text(encoding="utf-8"), re.S)
    assert "url(" not in style
    assert "@import" not in style


def test_headings_go_down_one_level_at_a_time(elements):
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_contents_lead_to_places_of_the_page(elements):
    places = [one["id"] for _, one in elements.found if "id" in one]
    assert len(places) == len(set(places))
    targets = [one["href"][1:] for one in elements.all("a") if one["href"].startswith("#")]
    assert {"figures", "kernel-times", "memory", "errors", "provenance", "graphs", "claims", "summary"} <= {*targets}
    assert {*targets} <= {*places}


def test_every_picture_says_what_it_shows(elements):
    pictures = elements.all("img")
    assert pictures
    assert all(len(one["alt"]) > 40 for one in pictures)
    assert any("fused3s_paper" in one["alt"] and "NVIDIA H200" in one["alt"] for one in pictures)


def test_text_of_the_csv_is_no_markup(elements):
    assert OOM in elements.text


def test_relative_links_of_markdown_lead_from_the_page_to_the_same_file(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "chart.png").write_bytes(PNG)
    text = "# Title\n\n[one](paper/README.md#part) [two](https://example.org) [three](#title) ![a](figures/chart.png)\n"
    elements = Elements(from_markdown(text, tmp_path, tmp_path / "own" / "deep" / "page.html"))
    assert [one["href"] for one in elements.all("a")] == ["../../paper/README.md#part", "https://example.org", "#title"]
    (picture,) = elements.all("img")
    assert base64.b64decode(picture["src"].removeprefix("data:image/png;base64,")) == PNG
    assert next(tag for tag, _ in elements.found if tag.startswith("h")) == "h2"


def test_an_empty_folder_is_an_error_that_names_it(tmp_path):
    done = CliRunner().invoke(load_script("html_report").app, ["--results", str(tmp_path)])
    assert done.exit_code == 2


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM or not DRIVER:
        pytest.skip(
            "no chromium and chromedriver on the path: the page is not opened (Debian: chromium chromium-driver)"
        )
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, page):
    """The browser with the page, freshly loaded."""
    browser.get(page.as_uri())
    return browser


def table_of(browser, anchor):
    return browser.find_element("css selector", f'.scroll[aria-labelledby="{anchor}"] table')


def column(table, head):
    """Texts of the visible cells below a heading, and the elements of heading and filter."""
    heads = table.find_elements("css selector", "thead tr:first-child th")
    (place,) = (nth for nth, one in enumerate(heads) if one.get_attribute("textContent") == head)
    lines = "[...arguments[0].tBodies[0].rows].filter((row) => row.offsetParent !== null)"
    cells = table.parent.execute_script(f"return {lines}.map((row) => row.cells[{place}].textContent)", table)
    return cells, heads[place], table.find_elements("css selector", "thead tr.filters th")[place]


def to_middle(browser, element):
    """Scroll the element away from the edges, where a heading that stays in place may cover it."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
    return element


def test_it_opens_without_errors_and_requests(opened, page):
    assert opened.title.startswith("Fused3S")
    assert opened.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    requests = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    urls = {one["request"]["url"] for one in requests if one["documentURL"] == page.as_uri()}
    assert page.as_uri() in urls
    assert [url for url in urls - {page.as_uri()} if not url.startswith("data:")] == []


def test_every_figure_has_a_size(opened):
    script = "return [...document.images].map((one) => [one.naturalWidth, one.naturalHeight, one.clientWidth])"
    sizes = opened.execute_script(script)
    assert len(sizes) > 1
    assert all(min(size) > 0 for size in sizes)


def test_a_click_on_a_heading_sorts_by_number_and_a_second_one_turns_the_order(opened):
    table = table_of(opened, "kernel-times")
    _, head, _ = column(table, "ms")
    for order in ("ascending", "descending"):
        to_middle(opened, head.find_element("tag name", "button")).click()
        assert head.get_attribute("aria-sort") == order
        *times, last = column(table, "ms")[0]
        assert last == "-"  # without a time: last in both orders
        expected = sorted((time for pair in TIMES.values() for time in pair), reverse=order == "descending")
        assert [float(time.replace(",", "")) for time in times] == expected


def test_filters_keep_the_lines_that_match_all_of_them(opened):
    table = table_of(opened, "kernel-times")
    every = len(column(table, "graph")[0])
    count = table.find_element("xpath", "../preceding-sibling::p[1]")
    column(table, "ms")[2].find_element("tag name", "input").send_keys("> 9.75")
    assert sorted({*column(table, "graph")[0]}) == ["cora", "pubmed", "reddit", "superpixel-bsds500"]
    kinds = column(table, "kind")[2].find_element("tag name", "select")
    kinds.send_keys("synthetic")
    assert column(table, "graph")[0] == ["reddit", "reddit"]
    assert count.text.startswith(f"2 of {every} lines")
    count.find_element("tag name", "button").click()
    assert len(column(table, "graph")[0]) == every


def test_a_status_without_a_time_is_found_with_its_reason(opened):
    table = table_of(opened, "kernel-times")
    column(table, "status")[2].find_element("tag name", "select").send_keys("oom")
    assert column(table, "backend")[0] == ["pyg"]
    assert column(table, "status")[0] == [f"oom: {OOM}"]
