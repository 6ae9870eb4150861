"""The page in a real browser: it sorts, filters, leads to records, works by keyboard and on a phone, and asks for
nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import chromium  # noqa: E402
import synthetic_study as synthetic  # noqa: E402

from grafting.analysis import report  # noqa: E402

pytestmark = pytest.mark.skipif(
    chromium.PATH is None,
    reason="no Chromium on PATH; `make browser` installs Debian's (the report itself needs no browser to be made)",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """results/report.html of an invented study, beside its records; REPORT=FILE looks at another one."""
    if "REPORT" in os.environ:
        return Path(os.environ["REPORT"]).resolve()
    job = synthetic.tiny_study(tmp_path_factory.mktemp("study")).job()
    report.run(job)
    return job.results / "report.html"


def drive(page, steps):
    """Run `steps(browser)` on the opened page; no console message, no request but the page itself."""

    async def session():
        async with chromium.Browser() as browser:
            await browser.look(1280, 900)
            await browser.open(page.as_uri())
            result = await steps(browser)
            return result, browser.messages, browser.requests

    result, messages, requests = asyncio.run(session())
    assert messages == []
    outside = [url for url in requests if not url.startswith(("data:", "file://"))]
    assert outside == []
    return result, requests


def test_page_is_small_quick_quiet_and_asks_for_nothing(page):
    async def steps(browser):
        timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        return await browser.value(f"[{timing}, document.querySelectorAll('img').length, document.title]")

    (took, pictures, title), requests = drive(page, steps)
    print(f"{page.stat().st_size} bytes, loaded in {took:.0f} ms, {pictures} figures")
    assert page.stat().st_size <= 3_000_000
    assert [url for url in requests if url.startswith("file://")] == [page.as_uri()]
    # a second on an idle machine; here other work may run beside it
    assert took < 5000 and pictures >= 8 and title.startswith("grafting, ")


COLUMN = "[...document.querySelectorAll('#t-results tbody tr')].filter(r => !r.hidden).map(r => {}.dataset.v)"


def test_tables_sort_by_click_and_key_and_filter(page):
    async def steps(browser):
        header = "[...document.querySelectorAll('#t-results th')].findIndex(h => h.textContent.startsWith('prior'))"
        place = await browser.value(header)
        button = f"document.querySelectorAll('#t-results th')[{place}].querySelector('button')"
        column = COLUMN.format(f"r.cells[{place}]")
        before = await browser.value(column)
        await browser.value(f"{button}.click()")
        rising = await browser.value(column), await browser.value(f"{button}.parentElement.ariaSort")
        await browser.value(f"{button}.focus()")
        await browser.key("Enter", 13, "\r")
        falling = await browser.value(column), await browser.value(f"{button}.parentElement.ariaSort")
        await browser.value("document.getElementById('t-results-filter').focus()")
        await browser.call("Input.insertText", text="opsd sequential")
        rows = await browser.value(
            "[...document.querySelectorAll('#t-results tbody tr')].filter(r => !r.hidden).map(r => r.textContent)"
        )
        return (
            before,
            rising,
            falling,
            rows,
            await browser.value("document.getElementById('t-results-said').textContent"),
        )

    (before, (rising, up), (falling, down), rows, said), _ = drive(page, steps)
    numbers = [float(v) for v in rising if v]
    assert numbers == sorted(numbers) and up == "ascending" and sorted(before) == sorted(rising)
    assert [float(v) for v in falling if v] == numbers[::-1] and down == "descending"
    assert rows and all("OPSD" in row and "sequential" in row for row in rows)
    assert said == f"{len(rows)} of {len(before)} rows"


def test_a_result_leads_to_its_record_and_on_to_the_file(page):
    async def steps(browser):
        link = "document.querySelector('#t-results tbody a[href^=\"#r-evaluate\"]')"
        target = await browser.value(f"{link}.hash.slice(1)")
        shut = await browser.value(f"document.getElementById('{target}').open")
        await browser.value(f"{link}.focus()")
        await browser.key("Enter", 13, "\r")
        await asyncio.sleep(0.3)
        opened = await browser.value(f"document.getElementById('{target}').open")
        place = await browser.value(f"document.getElementById('{target}').getBoundingClientRect().top")
        record = f"document.getElementById('{target}').querySelector('a.record')"
        await browser.loaded(browser.value(f"{record}.click()"))
        return (
            shut,
            opened,
            place,
            await browser.value("document.body.innerText"),
            await browser.value("location.pathname"),
        )

    (shut, opened, place, text, path), _ = drive(page, steps)
    assert (shut, opened) == (False, True) and 0 <= place < 900
    assert Path(path).parent.name == "evaluate" and '"stage"' in text and Path(path).stem in text


def test_keyboard_reaches_the_content(page):
    async def steps(browser):
        seen = []
        for _ in range(30):
            await browser.key("Tab", 9)
            seen.append(
                await browser.value("(document.activeElement.className || document.activeElement.tagName) + ''")
            )
        return seen

    seen, _ = drive(page, steps)
    assert seen[0] == "skip" and "scroll" in seen and "BODY" not in seen[:20]


@pytest.mark.parametrize(
    ("name", "width", "height", "dark"),
    [("light", 1280, 1600, False), ("dark", 1280, 1600, True), ("phone", 390, 844, False)],
)
def test_screenshots(page, tmp_path, name, width, height, dark):
    """Nothing is wider than the window, and ink stands out from paper; SCREENSHOTS=FOLDER keeps the pictures."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    async def steps(browser):
        await browser.look(width, height, dark, phone=width < 500)
        await browser.screenshot(folder / f"{name}.png")
        wide = await browser.value("document.documentElement.scrollWidth")
        colours = await browser.value("['color','backgroundColor'].map(c => getComputedStyle(document.body)[c])")
        await browser.value("document.getElementById('figures').scrollIntoView()")
        await asyncio.sleep(0.2)
        await browser.screenshot(folder / f"{name}-figures.png")
        await browser.value("document.getElementById('results').scrollIntoView()")
        await browser.screenshot(folder / f"{name}-results.png")
        return wide, colours

    (wide, (ink, paper)), _ = drive(page, steps)
    assert wide <= width
    light, deep = [sum(map(int, c[c.index("(") + 1 : -1].split(",")[:3])) / 3 for c in (ink, paper)]
    assert light > deep + 150 if dark else deep > light + 150
    assert (folder / f"{name}.png").stat().st_size > 10_000
