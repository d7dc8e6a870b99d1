"""Takes the pictures of the page: light, dark and on a phone, each of its two views, from a server on SmolLM2.

It needs Chromium and its driver (Debian: chromium, chromium-driver). Nothing in the pictures is made up: a server is
started, asked a few things, and looked at.

    python docs/screenshots.py
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

IMAGES = Path(__file__).parent / "images"
QUESTION = "What is the capital of France?"
SYSTEM = "You answer in one short sentence."
PORT = 30123


@dataclass(frozen=True, slots=True)
class Look:
    """How the page is looked at.

    Attributes:
        name: in the names of the files.
        width: of the window, in pixels.
        height: likewise.
        dark: whether the system prefers dark.
    """

    name: str
    width: int
    height: int
    dark: bool = False


LOOKS = (Look("light", 1200, 800), Look("dark", 1200, 800, dark=True), Look("phone", 390, 844))


@contextmanager
def serving() -> Iterator[str]:
    """A server on SmolLM2."""
    command = [str(Path(sys.executable).with_name("cardan")), "serve", "--port", str(PORT)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{PORT}"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        else:
            raise SystemExit("The server did not get ready; its log is above.")
        yield url
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def browser(look: Look) -> Iterator[webdriver.Chrome]:
    """Chromium without a screen."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options)
    try:
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if look.dark else "light"}]},
        )
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": look.width, "height": look.height, "deviceScaleFactor": 1, "mobile": look.width < 500},
        )
        yield driver
    finally:
        driver.quit()


def warm_up(url: str) -> None:
    """A little traffic, so that the live view has something to show."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for topic in ("rivers", "mountains", "lakes"):
        body = {"messages": [*messages, {"role": "user", "content": f"And its {topic}?"}], "max_tokens": 40}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def take(url: str, look: Look) -> None:
    """Both views in one look."""
    with browser(look) as driver:
        driver.get(url)
        driver.find_element(By.CSS_SELECTOR, "#settings summary").click()
        driver.find_element(By.ID, "system").send_keys(SYSTEM)
        driver.find_element(By.ID, "temperature").send_keys("0")
        driver.find_element(By.CSS_SELECTOR, "#settings summary").click()
        driver.find_element(By.ID, "text").send_keys(QUESTION + "\n")
        WebDriverWait(driver, 60).until(lambda page: page.find_elements(By.CSS_SELECTOR, ".turn .facts"))
        driver.save_screenshot(str(IMAGES / f"page-chat-{look.name}.png"))
        driver.find_element(By.ID, "tab-engine").click()
        WebDriverWait(driver, 30).until(lambda page: page.find_elements(By.CSS_SELECTOR, "#plan tbody tr"))
        time.sleep(3)  # a few points for the curves
        driver.save_screenshot(str(IMAGES / f"page-engine-{look.name}.png"))


def main() -> None:
    """Take them all."""
    IMAGES.mkdir(exist_ok=True)
    with serving() as url:
        warm_up(url)
        for look in LOOKS:
            take(url, look)


if __name__ == "__main__":
    main()
