"""The report in a real browser: complete, accessible, without requests and errors."""

import json
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.workflow.report.fake_run import finished_run
from workflow.report.__main__ import render

SECTIONS = {"overview", "funnel", "corpus", "curves", "layout", "time", "results", "checkpoint", "samples"}
CHARTS = 7
# the browser's own services stay silent, too: every name but localhost is unknown
OFFLINE = (
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync"),
    *("--disable-domain-reliability", "--no-first-run", "--no-pings", "--proxy-server=127.0.0.1:9"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",
)
pytestmark = pytest.mark.slow
LOOKS = [(1280, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium or chromedriver is not installed (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra: test)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    for flag in (*OFFLINE, *sandbox, "--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = finished_run(folder / "run", rows=60, models=("small", "tiny"))
    (folder / "report.html").write_text(render(run), encoding="utf-8")
    return folder / "report.html"


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    """Open the page as a screen of this width shows it."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


def test_the_page_opens_without_an_error_or_a_request_and_every_chart_has_marks(browser: Any, page: Path) -> None:
    show(browser, page, 1280, "light")
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert page.as_uri() in asked  # the log works
    assert not [url for url in asked if not url.startswith(("file:", "data:", "chrome:", "about:"))]
    assert browser.get_log("browser") == []
    sections = browser.execute_script("return [...document.querySelectorAll('section')].map(one => one.id)")
    assert {*sections} >= SECTIONS
    marks = "return [...document.querySelectorAll('svg')].map(one => one.querySelectorAll('title').length)"
    found = browser.execute_script(marks)
    assert len(found) == CHARTS and all(found), found


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_fits_the_screen_and_axe_finds_no_serious_fault(
    browser: Any, page: Path, width: int, scheme: str
) -> None:
    pytest.importorskip("axe_core_python", reason="axe-core-python is not installed (extra: test)")
    show(browser, page, width, scheme)
    for opened in ("false", "true"):
        browser.execute_script(f"document.querySelectorAll('details').forEach(one => one.open = {opened})")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(26, 26, 25)"
    assert dark == (scheme == "dark")
    axe = (resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    browser.execute_script(axe)
    found = browser.execute_async_script("axe.run().then(arguments[0])")
    assert found["passes"]
    faults = [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found["violations"]]
    assert not [fault for fault in faults if fault[1] in ("serious", "critical")], faults
