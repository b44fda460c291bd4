"""The page in a real Chromium: nothing hostile runs, nothing is fetched, tabs, readout and filter work by keyboard."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, evidence_row, hostile_run, make_run

from grpo_lightning.report import examine_run, render_report, write_report

webdriver = pytest.importorskip("selenium.webdriver")
BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Chromium and its driver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    rows = [evidence_row(i, g) for i in range(3) for g in range(4)]
    return write_report(examine_run(make_run(folder, evidence=rows)), folder / "r.html").as_uri()


def opened(browser: Any, address: str, hash: str = "") -> None:
    browser.get("about:blank")
    browser.get(address + hash)
    assert browser.get_log("browser") == []


def press(browser: Any, key: str) -> None:
    webdriver.ActionChains(browser).send_keys(key).perform()


def script(browser: Any, text: str, *args: object) -> Any:
    return browser.execute_script(text, *args)


@pytest.mark.parametrize("policy", [True, False], ids=["as written", "without its content security policy"])
def test_hostile_text_never_runs(browser: Any, tmp_path: Path, policy: bool) -> None:
    text = render_report(examine_run(hostile_run(tmp_path)))
    if not policy:  # the escaping alone must hold
        text, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        assert count == 1
    (tmp_path / "r.html").write_text(text)
    opened(browser, (tmp_path / "r.html").as_uri())
    script(browser, "document.querySelectorAll('details').forEach(d => d.open = true)")
    for tab in ("overview", "health", "diagnosis"):
        script(browser, "location.hash = arguments[0]", tab)
    for element in script(browser, "return [...document.querySelectorAll('.chart')].slice(0, 5)"):
        script(browser, "arguments[0].focus()", element)
        press(browser, webdriver.Keys.ARROW_RIGHT)
    assert script(browser, "return window.pwned === undefined")
    assert script(browser, "return document.querySelectorAll('img, iframe, object, embed, svg[onload]').length") == 0
    assert script(browser, "return performance.getEntriesByType('resource').length") == 0
    assert script(browser, "return document.scripts.length") == 2
    shown = script(browser, "return document.body.textContent")
    for hostile in HOSTILE[:7]:
        assert hostile in shown
    assert browser.get_log("browser") == []


def test_a_script_that_is_not_ours_would_not_run(browser: Any, tmp_path: Path) -> None:
    text = render_report(examine_run(make_run(tmp_path)))
    (tmp_path / "r.html").write_text(text.replace("</body>", "<script>window.pwned = 1</script></body>"))
    browser.get((tmp_path / "r.html").as_uri())
    assert script(browser, "return window.pwned === undefined")
    assert "Content Security Policy" in str(browser.get_log("browser"))


def test_one_page_at_a_time_by_keyboard(browser: Any, page: str) -> None:
    def shown() -> list[str]:
        found = script(
            browser,
            "return [...document.querySelectorAll('section:not([hidden])')].map(s => s.id)",
        )
        return [str(name) for name in found]

    opened(browser, page)
    assert shown() == ["overview"]
    script(browser, "document.querySelector('.tabs a').focus()")
    press(browser, webdriver.Keys.ARROW_RIGHT)
    assert shown() == ["health"]
    assert script(browser, "return document.activeElement.id") == "tab-health"
    press(browser, webdriver.Keys.ARROW_RIGHT)
    assert shown() == ["diagnosis"]
    press(browser, webdriver.Keys.ARROW_RIGHT)
    assert shown() == ["overview"]
    opened(browser, page, "#diagnosis")
    assert shown() == ["diagnosis"]


def test_without_scripts_all_pages_are_there(browser: Any, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")
        browser.get(page)
        heights = [element.size["height"] for element in browser.find_elements("css selector", "section")]
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert len(heights) == 3
    assert all(height > 100 for height in heights)


def reads(chart: Any, beginning: str) -> bool:
    """Whether a chart's readout comes to begin so: the page draws it when the browser gets to it."""
    until = time.monotonic() + 20
    while not chart.find_element("css selector", ".readout").text.startswith(beginning):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_the_readout_follows_pointer_and_keys_in_all_charts(browser: Any, page: str) -> None:
    opened(browser, page)
    charts = browser.find_elements("css selector", "#overview .chart")
    assert len(charts) >= 6
    rest = charts[0].find_element("css selector", ".readout").text
    webdriver.ActionChains(browser).move_to_element(charts[0].find_element("css selector", "svg")).perform()
    said = [chart.find_element("css selector", ".readout").text for chart in charts[:2]]
    steps = {re.match(r"step (\d+)", text)[1] for text in said if text.startswith("step")}  # type: ignore[index]
    assert len(steps) == 1  # both show the same step
    script(browser, "arguments[0].focus()", charts[0])
    press(browser, webdriver.Keys.HOME)
    assert reads(charts[0], "step 1 ")
    press(browser, webdriver.Keys.ARROW_RIGHT)
    assert reads(charts[0], "step 2 ")
    press(browser, webdriver.Keys.END)
    assert reads(charts[0], "step 80 ")
    press(browser, webdriver.Keys.ESCAPE)
    assert reads(charts[0], rest)


def test_the_readout_says_the_value_and_points_at_it(browser: Any, page: str) -> None:
    opened(browser, page, "#health")
    chart = browser.find_element("css selector", '#health .chart[data-name="entropy"]')
    script(browser, "arguments[0].focus()", chart)
    press(browser, webdriver.Keys.HOME)
    value = float(chart.find_element("css selector", ".readout").text.split()[-1])
    assert 0.9 < value < 1.6
    on_line = script(
        browser,
        "const c = arguments[0].querySelector('.cursor circle'), l = arguments[0].querySelector('.line').points[0];"
        "return [c.cx.baseVal.value - l.x, c.cy.baseVal.value - l.y]",
        chart,
    )
    assert on_line == [pytest.approx(0, abs=0.1), pytest.approx(0, abs=0.1)]


def test_a_number_leads_to_its_chart(browser: Any, page: str) -> None:
    opened(browser, page, "#diagnosis")
    link = browser.find_element("css selector", "#diagnosis .numbers a")
    name = link.text
    script(browser, "arguments[0].focus()", link)
    press(browser, webdriver.Keys.ENTER)
    assert script(browser, "return document.querySelector('section:not([hidden])').id") == "health"
    assert script(browser, "return document.activeElement.dataset.name") == name == "kl"
    browser.back()
    assert script(browser, "return document.querySelector('section:not([hidden])').id") == "diagnosis"


def test_a_signal_is_found_by_its_name(browser: Any, page: str) -> None:
    opened(browser, page)
    press(browser, "/")
    assert script(browser, "return document.activeElement.id") == "filter"
    press(browser, "p50")
    script(browser, "document.querySelectorAll('.chart').forEach(c => c.classList.toggle('seen', c.checkVisibility()))")
    names = script(browser, "return [...document.querySelectorAll('#health .seen')].map(c => c.dataset.name)")
    assert names == ["group_reward_std_p50"]  # its fold is opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_text_is_readable_and_nothing_overflows(browser: Any, page: str, scheme: str, width: int) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for tab in ("#overview", "#health", "#diagnosis"):
            opened(browser, page, tab)
            assert script(browser, "return document.documentElement.scrollWidth") <= width
            assert script(browser, _CONTRAST) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


_CONTRAST = """
const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = c.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const colour = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor);
  if (c.length === 3 || c[3] > 0.9) return c.slice(0, 3); } return [255, 255, 255]; };
const poor = [];
for (const e of document.querySelectorAll('body *:not(script)')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.checkVisibility()) continue;
  const style = getComputedStyle(e), ink = colour(e.ownerSVGElement ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 30));
}
return poor.slice(0, 5);
"""
