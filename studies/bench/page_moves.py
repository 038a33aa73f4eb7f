"""Timing of the web page of ebbtide's service in a real browser.

The time is measured from the move of a slider to the updated picture.
"""

import random
import shutil
from typing import Any

PATIENCE_MS = 120_000  # a busy machine may start slowly
SLIDERS = ("link_bytes_per_s", "device_memory_bytes", "sequence", "micro_batch")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

# Move to another step of the slider, so that the page sends a request.
_MOVE = """([id, share]) => {
    const slider = document.getElementById(id);
    const other = Math.floor(share * Number(slider.max));
    slider.value = other >= Number(slider.value) ? other + 1 : other;
    slider.dispatchEvent(new Event("input"));
}"""


def page_moves(url: str, moves: int = 60) -> list[float]:
    """Move sliders of the service's web page at random, and return a list of the seconds until each updated picture.

    The page itself measures the times. The list is empty if Chromium or playwright is missing.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    if program is None:
        return []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        # bypass_csp, because playwright polls with eval, which the page's policy forbids.
        page = browser.new_page(viewport={"width": 1440, "height": 900}, bypass_csp=True)
        page.goto(f"{url}/?model=Llama+3+8B&machine=h100-node", timeout=PATIENCE_MS)
        _answered(page, 1)
        rng = random.Random(0)
        for number in range(moves):
            page.evaluate(_MOVE, [f"c-{rng.choice(SLIDERS)}", rng.random()])
            _answered(page, number + 2)
        measured: list[Any] = page.evaluate(
            "() => performance.getEntriesByName('answer').map((entry) => entry.duration)"
        )
        browser.close()
    return [float(ms) / 1e3 for ms in measured[1:]]


def _answered(page: Any, times: int) -> None:
    page.wait_for_function(
        "(n) => performance.getEntriesByName('answer').length >= n && "
        "document.querySelector('#table').getAttribute('aria-busy') === 'false'",
        arg=times,
        timeout=PATIENCE_MS,
    )
