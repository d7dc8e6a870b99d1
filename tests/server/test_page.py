"""The page: its files for everybody, its live data for who has the key, and both in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread

from cardan.server.http.auth import PAGE_PATHS
from cardan.server.page.recent import MOST
from cardan.server.page.routes import FILES

HTML = {"Accept": "text/html,*/*;q=0.8"}


def test_a_browser_gets_the_page_and_others_a_word(client: httpx.Client) -> None:
    page = client.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert client.get("/").text == "Ollama is running"


def test_every_file_is_served_and_nothing_comes_from_elsewhere(client: httpx.Client) -> None:
    sources = [client.get("/", headers=HTML).text]
    for path, (_, media_type) in FILES.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(media_type)
        sources.append(answer.text)
    for text in sources:
        for path in re.findall(r'(?:src|href|from)[=\s]*"(/[^"]*)"', text):
            assert path in FILES
        # The name of SVG's elements is no address that anything is fetched from.
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert "innerHTML" not in text
    assert {"/", *FILES} == PAGE_PATHS


def test_the_live_view_needs_the_key_and_the_files_do_not(start_fake: Any) -> None:
    server = start_fake(api_key="secret")
    with httpx.Client(base_url=server.url, verify=False) as stranger:
        for path in PAGE_PATHS:
            assert stranger.get(path).status_code == 200
        assert stranger.get("/page/live").status_code == 401
    assert server.http.get("/page/live").status_code == 200


def test_live_data_follow_requests(start_fake: Any) -> None:
    engine = FakeEngine()
    server = start_fake(engine)
    before = server.http.get("/page/live").json()
    assert (before["recent"], before["latencies"]["time_to_first_token"]["count"]) == ([], 0)
    for text in ("the same", "the same", "[nan]"):
        server.http.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 4}})
    after = server.http.get("/page/live").json()
    failed, second, first = after["recent"]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 7)
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reason"]) == (8, 4, "length")
    assert failed["finish_reason"] == "error"
    assert 0 < first["first_token_s"] <= first["e2e_s"]
    latency = after["latencies"]["time_to_first_token"]
    assert latency["count"] == sum(latency["counts"]) == 3
    assert len(latency["counts"]) == len(latency["bounds_s"])
    assert after["stats"]["totals"]["generated_tokens"] > before["stats"]["totals"].get("generated_tokens", 0)
    assert "the same" not in server.http.get("/page/live").text


def test_the_live_view_answers_while_the_engine_does_not(start_fake: Any) -> None:
    engine = FakeEngine()

    async def dead() -> Any:
        from cardan.errors import EngineBusyError

        raise EngineBusyError("A step takes long.")

    engine.stats = dead  # type: ignore[method-assign]
    live = start_fake(engine).http.get("/page/live")
    assert (live.status_code, live.json()["stats"]) == (200, None)


def test_only_the_last_requests_are_kept(start_fake: Any) -> None:
    server = start_fake()
    body = {"text": ["x"] * (MOST + 5), "sampling_params": {"max_new_tokens": 1}}
    assert server.http.post("/generate", json=body).status_code == 200
    assert len(server.http.get("/page/live").json()["recent"]) == MOST


# --- in a browser ---

needs_browser = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs Chromium and its driver (Debian: chromium, chromium-driver)",
)
CHROMIUM = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for argument in CHROMIUM:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options)
    driver.implicitly_wait(0)
    yield driver
    driver.quit()


def wait(browser: Any, condition: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(condition)


def find(browser: Any, css: str) -> list[Any]:
    found: list[Any] = browser.find_elements("css selector", css)
    return found


def type_into(browser: Any, css: str, text: str) -> None:
    find(browser, css)[0].send_keys(text)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
@needs_browser
class TestInABrowser:
    """What a person sees and does."""

    def test_a_chat_streams_and_shows_its_facts(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake(FakeEngine(delay_s=0.01))
        browser.get(server.url)
        type_into(browser, "#text", "<b>hello</b> [eos]\n")
        wait(browser, lambda page: find(page, ".turn.assistant .facts"))
        assert find(browser, ".turn.user")[0].text == "<b>hello</b> [eos]"
        assert re.fullmatch(r"[a-z]{3}", find(browser, ".turn.assistant .answer")[0].text)
        assert "first after" in find(browser, ".turn.assistant .facts")[0].text
        type_into(browser, "#text", "again [eos]\n")
        wait(browser, lambda page: len(find(page, ".turn.assistant .facts")) == 2)
        # The conversation so far is sent along.
        assert "<b>hello</b>" in server.engine.tokenizer.decode(server.engine.seen[-1].input_ids or ())
        assert complaints(browser) == []

    def test_stop_aborts_the_request(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake(FakeEngine(delay_s=0.05))
        browser.get(server.url)
        type_into(browser, "#text", "go on\n")
        wait(browser, lambda page: find(page, ".turn.assistant .answer"))
        find(browser, "#stop")[0].click()
        server.wait_idle()
        wait(browser, lambda page: find(page, "#send")[0].is_enabled())

    def test_an_error_is_shown_and_the_chat_goes_on(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake()
        browser.get(server.url)
        server.engine.full = True
        type_into(browser, "#text", "too much\n")
        wait(browser, lambda page: "Too many requests wait" in find(page, ".turn.error")[0].text)
        server.engine.full = False
        type_into(browser, "#text", "again [eos]\n")
        wait(browser, lambda page: find(page, ".turn.assistant .facts"))

    def test_the_engine_is_seen_live(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake(FakeEngine(delay_s=0.01))
        complaints(browser)  # of tests before this one
        browser.get(f"{server.url}/#engine")
        server.http.post("/generate", json={"text": "seen", "rid": "seen-live"})
        wait(browser, lambda page: "seen-live" in find(page, "#recent tbody")[0].text)
        assert find(browser, "#ttft rect")
        assert find(browser, "#throughput path")
        assert find(browser, "#status")[0].text == "ready"
        assert "fake" in find(browser, "#plan tbody")[0].text
        assert not find(browser, "#chat")[0].is_displayed()
        assert complaints(browser) == []

    def test_the_key_is_asked_for_once(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake(api_key="secret")
        browser.get(server.url)
        wait(browser, lambda page: find(page, "#key")[0].is_displayed())
        type_into(browser, "#key", "secret\n")
        wait(browser, lambda page: find(page, "#status")[0].text == "ready")
        type_into(browser, "#text", "hello [eos]\n")
        wait(browser, lambda page: find(page, ".turn.assistant .facts"))

    def test_light_dark_and_phone(self, browser: Any, start_fake: Any) -> None:
        server: ServerThread = start_fake()
        browser.get(server.url)

        def ground() -> str:
            return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))

        before = ground()
        find(browser, "#theme")[0].click()
        assert ground() != before
        find(browser, "#theme")[0].click()
        assert ground() == before
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        try:
            for view in ("#chat", "#engine"):
                browser.get(server.url + "/" + view)
                wait(browser, lambda page: find(page, "#status")[0].text == "ready")
                width = browser.execute_script("return document.documentElement.scrollWidth")
                assert width <= 390, view
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
