"""Tests of the service's what-if page in a real browser. Screenshots go to $EBBTIDE_SCREENSHOTS, if set."""

import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: apt-get install chromium to run the page's tests"
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"
QUIET = ("gpu", "background-networking", "component-update", "sync")
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
KINDS = ("parameters", "gradients", "state", "activations", "buckets", "staging")
PATIENCE_MS = 300_000  # for a browser beside other tests. Playwright's default is 30 s
# A model with few layers, because searching, drawing and checking the plan of a larger one takes much longer.
ASKED = "/?model=Llama+3.2+1B&machine=rtx4090-x4&gpus=1"

# After each change of the form, the page requests the full search, which takes seconds of a core. No test looks at its
# answer. So the page gets the quick answer instead, which it has requested in two parts.
QUICK_ANSWERS = """
const { fetch } = window;
let timelines, quick;
window.fetch = async (url, options = {}) => {
  if (!String(url).endsWith("/answer") || !options.body) return fetch(url, options);
  const { effort, peers = true } = JSON.parse(options.body);
  if (effort === "full") return Response.json(quick);
  const response = await fetch(url, options);
  if (!response.ok) return response;
  const answer = await response.clone().json();
  timelines = answer.timelines || timelines;
  if (peers) quick = { ...answer, timelines };
  return response;
};
"""
# A second press within SURE_MS of jobs.js deletes. A slow test may be later than that.
UNHURRIED = """
const { setTimeout } = window;
window.setTimeout = (call, ms, ...rest) => setTimeout(call, ms === 4000 ? 600_000 : ms, ...rest);
"""

# Elements that extend beyond a width.
BEYOND = """width => [...document.querySelectorAll("body *")]
    .filter(one => one.getBoundingClientRect().right > width)
    .map(one => one.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")  # workers that run other files do not import it
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def window(browser):
    """Yield one browser page for all tests. Opening a new page for each test would take three times as long."""
    made = browser.new_page(viewport={"width": 1440, "height": 900})
    made.set_default_timeout(PATIENCE_MS)
    made.add_init_script(QUICK_ANSWERS)
    made.add_init_script(UNHURRIED)
    yield made
    made.close()


@pytest.fixture
def page(window):
    window.problems = problems = []
    hear = {
        "console": lambda m: problems.append(m.text) if m.type == "error" else None,
        "pageerror": lambda error: problems.append(str(error)),
    }
    for event, heard in hear.items():
        window.on(event, heard)
    yield window
    window.evaluate("sessionStorage.clear()")
    window.unroute_all()
    window.goto("about:blank")
    for event, heard in hear.items():
        window.remove_listener(event, heard)
    assert not problems, problems


def opened(page, server, query=ASKED):
    page.goto(server.url + query)
    settled(page)
    return page


def settled(page):
    """Wait until the web page shows the complete answer to the last change of its form."""
    page.wait_for_selector('#table[aria-busy="false"] tr[data-strategy=twin_flow]')


# Placeholder texts that do not fit into their fields.
CUT_PLACEHOLDERS = """() => {
  const pen = document.createElement("canvas").getContext("2d");
  return [...document.querySelectorAll("#controls input[type=number]:placeholder-shown")].filter((field) => {
    const style = getComputedStyle(field);
    pen.font = style.font;
    const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return pen.measureText(field.placeholder).width > room;
  }).map((field) => field.placeholder);
}"""

SLOW_REQUESTS = """() => {
  const { fetch } = window;
  window.fetch = async (url, ...more) => {
    if (String(url).endsWith("/request")) await new Promise((done) => setTimeout(done, 300));
    return fetch(url, ...more);
  };
}"""


# Moves the slider next to the wanted position. The key that follows sends the event to the page.
MOVE = """([id, steps]) => {
    const slider = document.getElementById(id);
    slider.value = Number(slider.value) + steps;
}"""


def move(page, slider, steps, *, keys=False):
    """Move a slider of the web page, at once or with the arrow keys. Return the server's answer to the last position,
    once the page shows it.

    The page asks the server at each step of the arrow keys.
    """
    answers = []

    def hear(response):
        answers.append(response)

    page.on("response", hear)
    page.focus(f"#c-{slider}")
    page.evaluate(MOVE, [f"c-{slider}", 0 if keys else steps - (1 if steps > 0 else -1)])
    for _ in range(abs(steps) if keys else 1):
        page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")
    query = parse_qs(page.evaluate("location.search.slice(1)"))
    asked = float(query[slider][0]) if slider in query else None
    while not (last := [r for r in answers if _answers(r, slider, asked)]):
        page.wait_for_event("response")
    page.remove_listener("response", hear)
    settled(page)
    return last[-1].json()


def _answers(response, slider, asked):
    if not response.url.endswith("/answer"):
        return False
    body = response.request.post_data_json
    whole = body.get("peers", True) and body.get("effort") != "full"
    return whole and body.get(slider) == asked


def asked_of(page):
    """Return the settings that the web page's address holds: model, machine, and the values of the form."""
    query = {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}
    numbers = {key: float(value) for key, value in query.items() if key not in ("model", "machine")}
    return {**query, **{k: int(v) if v.is_integer() else v for k, v in numbers.items()}}


def test_moving_sliders_shows_what_the_api_says(page, server):
    opened(page, server)
    for slider, steps in (("gpus", 1), ("link_bytes_per_s", -1), ("micro_batch", 2), ("device_memory_bytes", -1)):
        move(page, slider, steps, keys=slider == "micro_batch")
    asked = asked_of(page)
    assert set(asked) >= {"gpus", "link_bytes_per_s", "micro_batch", "device_memory_bytes"}
    expected = server.post("/answer", asked).json()
    assert page.inner_text("#sentence") == expected["sentence"]
    for row in expected["rows"]:
        cells = page.locator(f"tr[data-label='{row['label']}'] td").all_inner_texts()
        seconds, *interval = cells[0].split("\n")
        assert seconds == page.evaluate("async s => (await import('/format.js')).seconds(s)", row["iteration_s"])
        assert bool(interval) == (row["iteration_low_s"] is not None)
        assert cells[-1] == ("✓ fits" if row["fits"] else f"✗ {row['reason']}")
    held = {role: kinds["device"] for role, kinds in expected["memory"].items()}
    told = page.get_attribute("#kinds .chart svg", "aria-label")  # the chart of the GPU is the first
    gib = "async b => (await import('/format.js')).gib(b)"
    for role, kinds in held.items():
        words = [f"{kind} {page.evaluate(gib, kinds[kind])}" for kind in KINDS if kinds.get(kind)]
        total = page.evaluate(gib, sum(kinds.values()))
        assert f"{role.capitalize()} {total}: {', '.join(words)}" in told
    pieces = sum(1 for kinds in held.values() for size in kinds.values() if size)
    assert page.locator("#kinds .chart svg").first.locator("[data-kind]").count() == pieces


def test_reload_and_shared_link_give_the_same_view(page, server, browser):
    opened(page, server)
    move(page, "sequence", 2)
    sentence, link = page.inner_text("#sentence"), page.url
    page.reload()
    settled(page)
    assert page.inner_text("#sentence") == sentence
    other = browser.new_page()
    other.set_default_timeout(PATIENCE_MS)
    other.goto(link)
    settled(other)
    assert other.inner_text("#sentence") == sentence
    assert other.input_value("#c-sequence") == page.input_value("#c-sequence")
    other.close()


def test_a_job_is_watched_to_its_end_and_its_result_opens_in_what_if(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090&gpus=1&micro_batch=2")
    page.click("#search")
    download = page.get_by_role("button", name="Download result")
    download.wait_for(timeout=PATIENCE_MS)
    with page.expect_download() as saved:
        download.click()
    plan = json.loads(Path(saved.value.path()).read_text())
    job, address = parse_qs(urlsplit(page.url).query)["job"][0], page.url
    page.locator("#opened").get_by_role("link", name="Open in What if").click()
    page.wait_for_function("() => document.querySelector('#effort').textContent.includes('a job')")
    settled(page)
    assert page.input_value("#n-micro_batch") == "2"
    # The page answers with a quick plan. Full and quick answers may differ by half a percent.
    shown_ms = float(re.search(r"([\d.]+) ms", page.locator(".tile").first.inner_text())[1])
    assert shown_ms / 1e3 == pytest.approx(plan["prediction"]["iteration_s"], rel=0.006)
    page.go_back()
    page.wait_for_selector("#opened #opened-content ul")
    assert page.url == address
    page.reload()
    download.wait_for()
    _runs_again_and_is_deleted(page, page.locator(f"[data-job='{job}']"))


def test_a_jobs_result_opens_with_all_that_the_job_was_asked(page, server):
    """Check that a search's row opens with its own figures, also of a field that no control of the page shows."""
    unshown = {"flash_attention": False, "clip_rate": 0.5, "recompute_share": 0.5, "subgroup_size": 10**8}
    asked = {"model": "Llama 3.2 1B", "machine": "h100-node", "sequence": 512, "gpus": 1, "kernels": "eager", **unshown}
    search = {**asked, "free": ["micro_batch"], "offload": False}
    job = server.post("/jobs/search", search).json()["id"]
    assert [state for _, state in server.events(f"/jobs/{job}/events")][-1]["state"] == "done"
    found = server.client.get(f"/jobs/{job}/result").json()["front"][0]
    with page.expect_response(lambda r: r.url.endswith("/answer")) as first:
        opened(page, server, f"/?from={job}&row=0")
    assert unshown.items() <= first.value.request.post_data_json.items()
    (plain,) = (row for row in first.value.json()["rows"] if row["role"] == "no offload")
    assert plain["iteration_s"] <= found["iteration_s"] * (1 + 1e-9)  # at the fastest ZeRO stage
    assert "subgroup_size 100000000" in page.inner_text("#strange")
    shown = [page.input_value(f"#n-{key}") for key in ("clip_rate", "recompute_share")]
    assert [*shown, page.input_value("#c-flash_attention")] == ["50", "50", "false"]
    with page.expect_response(lambda r: r.url.endswith("/answer")) as moved:
        page.fill("#n-sequence", "256")
        page.press("#n-sequence", "Enter")
    assert unshown.items() <= moved.value.request.post_data_json.items()
    settled(page)
    with page.expect_response(lambda r: r.url.endswith("/answer")) as again:
        page.reload()
    assert again.value.request.post_data_json == moved.value.request.post_data_json
    settled(page)


def test_the_cells_of_a_grid_are_shown(page, server):
    asked = {"model": "Llama 3.2 1B", "machine": "rtx4090", "sequence": 256, "strategies": ["zero3_offload"]}
    grid = {**asked, "gpu_memory_bytes": [2**34, 2**31], "changes": {"h2d_bytes_per_s": [1e10, 2e10]}}
    job = server.post("/jobs/what-if", grid).json()["id"]
    page.goto(f"{server.url}/?job={job}")
    cells = page.locator("#opened-content tbody tr")
    cells.first.wait_for()
    told = cells.all_inner_texts()
    assert len(told) == 4
    assert "16.0 GiB of GPU memory, h2d_bytes_per_s 10000000000" in told[0]
    rows = server.client.get(f"/jobs/{job}/result").json()["rows"]
    assert [("✓ fits" in text) for text in told] == [row["fits"] for row in rows]
    short = [(row["reason"], text) for row, text in zip(rows, told, strict=True) if not row["fits"]]
    assert len(short) == 2
    assert all(reason in text for reason, text in short)


def _runs_again_and_is_deleted(page, card):
    cards = page.locator("#jobs .card")
    before = cards.count()
    card.get_by_role("button", name="Run again").click()
    page.wait_for_function("n => document.querySelectorAll('#jobs .card').length > n", arg=before)
    card.get_by_role("button", name="Delete").click()
    assert card.count() == 1
    card.get_by_role("button", name="Delete for good?").click()
    card.wait_for(state="detached")
    page.wait_for_function("() => location.search === '?view=work'")  # the deleted job was shown
    page.fill("#filter", "no such job")
    assert cards.count() == 0
    page.fill("#filter", "rtx4090 plan")
    assert cards.count() >= 1


def test_a_lost_connection_is_told_until_it_is_back(page, server):
    page.route("**/api/v1/events", lambda route: route.abort())
    page.goto(server.url + ASKED)
    page.wait_for_selector("#lost:not([hidden])")
    assert "No connection" in page.inner_text("#lost")
    page.unroute("**/api/v1/events")
    page.wait_for_selector("#lost", state="hidden")
    page.problems.clear()  # the browser's own message about the request


def test_a_job_can_be_cancelled_while_it_reports(page, server):
    """Check that a job can be cancelled although its card is redrawn during the click, which takes 110 ms."""
    opened(page, server, "/?model=Llama+2+13B&machine=h100-node&gpus=4&micro_batch=4")
    page.click("#search-configurations")
    card = page.locator("#jobs .card", has_text="13B").first  # a job of another test may still be running
    cancel = card.get_by_role("button", name="Cancel")
    cancel.focus()
    while not page.evaluate("document.querySelector('#jobs .card progress').value > 0"):
        page.wait_for_timeout(20)
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    cancel.click(delay=110)
    card.locator(".state.cancelled").wait_for()


def test_a_scenario_is_pinned_and_compared_and_one_thing_swept(page, server):
    opened(page, server)
    before = page.locator(".tile-value").first.inner_text()
    page.click("#pin")
    move(page, "gpus", 1)
    cells = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator("#comparison tbody tr").all_inner_texts()}
    assert cells["GPUs"][:2] == ["1", "2"]
    assert cells["Iteration"][:2] == [before, page.locator(".tile-value").first.inner_text()]
    assert page.locator("#timelines .entry").count() == 3
    page.reload()
    settled(page)
    again = page.locator("#comparison tr", has_text="Iteration").inner_text()
    assert again.split("\t")[1] == before
    page.click("#sweep summary")
    page.select_option("#swept", "micro_batch")
    stop = page.locator("#swept-chart .stop").nth(2)
    page.locator("#swept-chart [role=status]", has_text="Choose a value").wait_for()
    assert page.locator("#swept-chart .stop").count() == 9
    stop.focus()
    told = page.inner_text("#swept-chart [role=status]")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#n-micro_batch').value === '3'")
    assert told.startswith("Micro-batch 3 samples: ")
    settled(page)
    tokens = float(told.split("Plan ")[1].removesuffix(" tokens/s").replace(",", ""))
    shown = float(page.locator(".tile", has_text="Tokens/s").locator(".tile-value").inner_text().replace(",", ""))
    assert tokens == pytest.approx(shown, rel=0.04)  # the sweep tries the plans of all its points
    page.go_back()
    page.wait_for_function("() => document.querySelector('#n-micro_batch').value === '1'")
    page.click("#pin")
    assert page.is_hidden("#compared")
    assert "pin=" not in page.url


def test_what_cannot_be_answered_leaves_nothing_to_press(page, server):
    opened(page, server)
    assert page.is_enabled("#save-plan")
    refused = json.dumps({"errors": [{"key": "machine", "rule": "must be known", "value": "x"}]})
    page.route(
        "**/api/v1/answer", lambda route: route.fulfill(status=422, body=refused, content_type="application/json")
    )
    page.focus("#c-gpus")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#answer.refused")
    for button in ("save-plan", "save-trace", "save-report", "search"):
        assert page.is_disabled(f"#{button}")
    page.problems.clear()  # the browser's own message about the 422


def test_a_link_to_what_is_not_here_says_so(page, server):
    parts = {"model=NoSuch": "NoSuch", "machine=nowhere": "nowhere", "sequence=long": "long", "zero_stage=9": "9"}
    parts["no=1"] = "no"
    page.goto(f"{server.url}/?{'&'.join(parts)}&micro_batch=7")
    page.wait_for_selector("#answer.refused")
    told = page.inner_text("#sentence")
    assert all(f"“{name}”" in told for name in parts.values())
    assert "7" not in told
    for part, name in parts.items():  # each alone is said too, and nothing else is answered instead
        page.goto(f"{server.url}/?{part}")
        page.wait_for_selector("#answer.refused")
        assert f"“{name}”" in page.inner_text("#sentence")
        assert not page.inner_text("#tiles")
    page.select_option("#c-model", "Llama 3.2 1B")
    settled(page)
    assert page.locator("#answer.refused").count() == 0


def test_what_was_said_about_an_old_question_goes_with_it(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090&sequence=8192&micro_batch=4")
    page.wait_for_function("() => document.querySelector('#status').textContent.includes('Looking for changes')")
    page.evaluate(STALE_SEEN)
    page.fill("#n-sequence", "512")
    page.press("#n-sequence", "Enter")
    settled(page)
    assert page.evaluate("window.staleSeen"), "the old answer must be dimmed while the new one comes"
    assert page.locator("#answer.stale").count() == 0
    assert page.inner_text("#status") == ""


STALE_SEEN = """() => new MutationObserver(() => {
    window.staleSeen ||= document.querySelector("#answer").classList.contains("stale");
}).observe(document.querySelector("#answer"), { attributeFilter: ["class"] })"""


def test_more_cards_are_asked_for_by_machine_and_by_number(page, server):
    with page.expect_request(lambda r: r.url.endswith("/answer")) as first:
        opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090-x2")
    assert first.value.post_data_json["gpus"] == 2
    page.select_option("#c-machine", "rtx4090")
    settled(page)
    assert page.input_value("#n-gpus") == "1"
    page.click("#pin")
    page.fill("#n-gpus", "8")
    with page.expect_request(lambda r: r.url.endswith("/answer")) as more:
        page.press("#n-gpus", "Enter")
    assert {"machine": "rtx4090-x8", "gpus": 8}.items() <= more.value.post_data_json.items()
    settled(page)
    cells = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator("#comparison tbody tr").all_inner_texts()}
    assert cells["GPUs"][:2] == ["1", "8"]
    assert cells["Tokens per second"][2][0] in "+0123456789", "eight cards are not slower than one"
    page.click("#sweep summary")
    page.select_option("#swept", "gpus")
    page.wait_for_function("() => document.querySelectorAll('#swept-chart .stop').length === 4")


def test_a_buyer_sees_time_cost_and_all_machines(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090&tokens=2e9")
    rows = server.post("/answer", {"model": "Llama 3.2 1B", "machine": "rtx4090"}).json()["rows"]
    tokens_per_s = next(row["tokens_per_s"] for row in rows if row["role"] == "plan")
    assert page.input_value("#n-tokens") == "2"
    page.fill("#n-price", "0.5")
    shown = page.inner_text("#cost")
    assert f": {2e9 / tokens_per_s / 3600 * 0.5:,.0f} in all" in shown
    assert "price=0.5" in page.url
    page.route("**/cards", lambda route: route.continue_(post_data=_of_two_machines(route)))
    page.click("#cards summary")
    rows = page.locator("#cards-table tbody tr")
    page.wait_for_function("() => document.querySelector('#cards-told').textContent === ''")
    names = [rows.nth(n).get_attribute("data-machine") for n in range(rows.count())]
    page.click("#cards-table [data-column='Machine']")
    assert [rows.nth(n).get_attribute("data-machine") for n in range(rows.count())] != names
    assert page.locator("#cards-table th[aria-sort]").count() == 1
    desk = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    page.click("#cards-table [data-column='Tokens/s']")
    assert page.get_attribute("#cards-table th[aria-sort]", "aria-sort") == "descending"
    page.set_viewport_size(desk)
    page.unroute("**/cards")
    page.click("#cards-table tr[data-machine='rtx4090-x2'] a")
    settled(page)
    assert (page.input_value("#c-machine"), page.input_value("#n-gpus")) == ("rtx4090-x2", "2")
    assert page.input_value("#n-tokens") == "2"


def _of_two_machines(route):
    return json.dumps({**route.request.post_data_json, "machines": ["rtx4090-x2", "h200"]})


def _of_few_configurations(route):
    """Send on the page's request for a search, but let the search vary fewer settings."""
    asked = route.request.post_data_json
    route.continue_(post_data=json.dumps({**asked, "free": ["micro_batch", "accumulation", "zero_stage"]}))


def test_configurations_are_searched_and_shown(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090&micro_batch=2")
    page.route("**/jobs/search", _of_few_configurations)
    page.click("#search-configurations")
    card = page.locator("#jobs .card").first
    card.locator(".state.done").wait_for(timeout=PATIENCE_MS)
    assert card.inner_text().startswith("Search")
    page.wait_for_selector("#opened tbody tr")
    job = card.get_attribute("data-job")
    result = server.client.get(f"/jobs/{job}/result").json()
    assert {row["configuration"]["micro_batch"] for row in result["outcomes"]} == {1, 2}
    rows = page.locator("#opened tbody tr")
    assert rows.count() == len(result["front"])
    assert result["remarks"][0] in page.inner_text("#opened")
    number, found = next(
        (n, row["configuration"]) for n, row in enumerate(result["front"]) if row["configuration"]["micro_batch"] == 1
    )
    page.evaluate(SLOW_REQUESTS)  # meanwhile the page shows no answer
    rows.nth(number).get_by_role("link").click()
    settled(page)
    assert page.input_value("#n-micro_batch") == str(found["micro_batch"])
    assert page.input_value("#c-zero_stage") == str(found["zero_stage"])


def test_failures_act_on_the_page(page, server):
    opened(page, server)
    assert page.locator(".tile", has_text="Useful time").count() == 0
    page.click("text=Parallelism, launcher, storage, failures")
    answer = move(page, "mtbf_s", 3)
    shown = page.locator(".tile", has_text="Useful time").inner_text()
    assert answer["goodput"]["mtbf_s"] == 4 * 3600
    plan = answer["goodput"]["by_role"]["plan"]
    assert f"{100 * plan['goodput']:.1f}%" in shown
    assert f"every {plan['interval_steps']:,} steps" in shown
    assert "failure every 4 h" in page.inner_text("#notes")


def test_storage_for_state_is_asked_for_on_the_page(page, server):
    opened(page, server, f"/?model=Llama+3+8B&machine=h100-node&host_memory_bytes={2**35}")
    page.click("text=Parallelism, launcher, storage, failures")
    answer = move(page, "storage_bytes", 3)
    assert answer["limits"]["storage_bytes"] > 0.98 * 2**38
    move(page, "endurance_bytes", 5)
    assert "Drives rated for 3,000 TB last" in page.inner_text("#notes")


def test_a_style_sheet_that_fails_once_is_asked_for_again(page, server):
    page.route("**/style.css", lambda route: route.abort(), times=1)
    opened(page, server)
    page.wait_for_function("() => getComputedStyle(document.body).display === 'flex'")
    page.problems.clear()  # the browser's own message about it


def test_the_page_opens_with_the_demos_run(page, server):
    opened(page, server, "/")
    shown = page.inner_text("#c-model option:checked"), page.inner_text("#c-machine option:checked")
    assert shown == ("Llama 3 8B", "RTX 4090"), "the shipped example is a choice, and not what a newcomer asks for"
    assert "profiled" in page.inner_text("#c-model")
    page.click("#tab-work")
    page.click("#runs .card-title a")
    page.wait_for_selector("#opened svg rect.op", state="attached")
    phases = page.locator("#opened tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in phases] == ["Forward", "Backward", "Step", "Iteration"]
    assert "%" in phases[-1], "how far the prediction is off"
    titles = page.locator("#opened .timelines text.entry").all_text_contents()
    beside = [name for name in ("Predicted", "Measured") if any(title.startswith(name) for title in titles)]
    assert beside == ["Predicted", "Measured"], "the plan's prediction stands beside what was measured"


def test_timelines_are_read_and_zoomed_by_keyboard_and_pointer(page, server):
    opened(page, server)
    assert "The critical path of an iteration is" in page.inner_text("#difference")
    assert page.locator("#timelines .critical").count() > 4
    page.focus("#timelines .timelines")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    told = page.inner_text("#timelines [role=status]")
    assert told.startswith("Stock, H2D gradients: ")
    assert " ms)" in told
    before = page.locator("#timelines .tick").all_text_contents()
    page.keyboard.press("+")
    assert page.locator("#timelines .tick").all_text_contents() != before
    assert page.locator("#timelines .chosen-op").count() == 1  # a frame around the chosen op
    page.keyboard.press("0")
    assert page.locator("#timelines .tick").all_text_contents() == before
    box = page.locator("#timelines svg").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40)
    page.mouse.up()
    assert page.locator("#timelines .tick").all_text_contents() != before
    page.click("#timelines .tools button:last-child")
    assert page.locator("#timelines .tick").all_text_contents() == before


def test_plan_trace_and_report_are_downloaded(page, server):
    opened(page, server)
    contents = {}
    for button in ("save-plan", "save-trace", "save-report"):
        with page.expect_download() as saved:
            page.click(f"#{button}")
        contents[button] = Path(saved.value.path()).read_text()
    assert json.loads(contents["save-plan"])["ways"]
    assert json.loads(contents["save-trace"])["traceEvents"]
    assert "Content-Security-Policy" in contents["save-report"]


def test_the_report_draws_itself_without_a_network(browser, tmp_path):
    from ebbtide.simulator import Plan
    from ebbtide.tuner.service.report import read_timelines, report_html
    from ebbtide.tuner.service.server import shipped_example

    example = shipped_example()
    timelines = read_timelines((example / "trace.json").read_text())
    plan = Plan.load(example / "plan.json")
    held = {
        "memory": {"device": {"state": 2**30}, "host": {"state": 2**29}},
        "limits": {"device": 2**31, "host": 2**31},
    }
    predicted = plan.prediction.model_copy(update=held)
    path = tmp_path / "report.html"
    path.write_text(report_html(plan.model_copy(update={"prediction": predicted}), timelines))
    context = browser.new_context(offline=True, viewport={"width": 900, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page, problems = context.new_page(), []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.goto(path.as_uri())
    assert page.locator("#timelines rect.op").count() > 10
    assert page.locator("#table tbody tr").count() > 3
    told = [page.locator("#kinds .chart svg").nth(n).get_attribute("aria-label") for n in (0, 1)]
    assert told == ["GPU memory. Plan 1.0 GiB: state 1.0 GiB", "Host memory per rank. Plan 512 MiB: state 512 MiB"]
    assert not problems
    _photograph(page, "report")
    context.close()


def test_what_a_user_names_stays_text(page, server, tmp_path):
    opened(page, server)
    evil = '<img src=x onerror="document.title=1">'
    config = {
        "_name_or_path": evil,
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    page.click("#upload summary")
    page.set_input_files("#file", tmp_path / "config.json")
    page.wait_for_function("evil => document.querySelector('#context').textContent.includes(evil)", arg=evil)
    settled(page)
    assert page.locator("main img").count() == 0
    assert page.title() != "1"


def test_plain_transformers_kernels_are_asked_for_and_stay_in_the_address(page, server):
    opened(page, server)
    assert page.input_value("#c-kernels") == "fused"
    page.click("text=ZeRO, precision, kernels, offloads")
    with page.expect_request(lambda r: '"kernels":"eager"' in (r.post_data or "")):
        page.select_option("#c-kernels", "eager")
    page.wait_for_function("() => location.search.includes('kernels=eager')")
    page.reload()
    page.wait_for_selector('#table[aria-busy="false"] tr')
    assert page.input_value("#c-kernels") == "eager"


def test_a_deepspeed_config_is_pasted_and_the_launcher_chosen(page, server):
    opened(page, server)
    page.click("#upload summary")
    page.fill("#pasted", '{"zero_optimization": {"stage": 2,')
    page.press("#pasted", "Tab")
    assert "must be JSON" in page.inner_text("#file-told")
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "sub_group_size": 10**8, "offload_optimizer": {"device": "cpu"}},
    }
    page.fill("#pasted", json.dumps(config))
    page.press("#pasted", "Tab")
    values = {
        key: page.input_value(f"#{key}") for key in ("n-micro_batch", "n-accumulation", "c-zero_stage", "c-precision")
    }
    assert [*values.values()] == ["4", "3", "2", "fp16"]
    page.select_option("#c-zero_stage", "3")
    page.select_option("#c-offload", "parameters")
    page.click("text=Parallelism, launcher, storage, failures")
    with page.expect_request(lambda r: '"launcher":"torchrun"' in (r.post_data or "")) as asked:
        page.select_option("#c-launcher", "torchrun")
    sent = asked.value.post_data_json["ds_config"]
    assert sent["zero_optimization"]["stage"] == 3
    assert sent["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert (sent["train_micro_batch_size_per_gpu"], sent["gradient_accumulation_steps"]) == (4, 3)
    page.wait_for_function("() => document.querySelector('#use-json').textContent.includes('fp16')")
    page.reload()
    page.wait_for_selector('#table[aria-busy="false"] tr')
    assert page.input_value("#c-precision") == "fp16"
    assert page.input_value("#c-launcher") == "torchrun"
    page.click("#config-gone")
    page.wait_for_function("() => !location.search.includes('ds_config')")
    assert page.input_value("#c-precision") == "bf16"


def test_where_nothing_fits_a_press_makes_it_fit(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=rtx4090&sequence=8192&micro_batch=4")
    offered = page.locator("#ways button", has_text="sequence 2048")
    offered.wait_for()
    assert page.inner_text("#sentence").startswith("Nothing fits")
    _photograph(page, "ways_out")
    offered.click()
    page.wait_for_function("() => document.querySelector('#answer').dataset.verdict === 'offload'")
    assert parse_qs(page.evaluate("location.search.slice(1)")).get("sequence") is None  # 2048 is the default
    assert page.locator("#ways").is_hidden()


def test_a_number_may_be_typed_and_a_stage_chosen(page, server):
    opened(page, server)
    for number, value in (("micro_batch", "5"), ("device_memory_bytes", "20.5")):
        page.fill(f"#n-{number}", value)
        page.press(f"#n-{number}", "Enter")
    page.click("text=ZeRO, precision, kernels, offloads")
    with page.expect_response(lambda r: '"zero_stage":2' in (r.request.post_data or "")):
        page.select_option("#c-zero_stage", "2")
    asked = asked_of(page)
    assert asked["micro_batch"] == 5
    assert asked["device_memory_bytes"] == round(20.5 * 2**30)
    assert asked["zero_stage"] == 2
    page.reload()
    page.wait_for_selector('#table[aria-busy="false"] tr')  # for ZeRO-2, which has fewer other systems
    assert page.input_value("#n-micro_batch") == "5"
    assert page.input_value("#c-zero_stage") == "2"
    page.fill("#n-micro_batch", "-3")
    page.press("#n-micro_batch", "Enter")
    assert page.get_attribute("#n-micro_batch", "aria-invalid") == "true"
    assert asked_of(page)["micro_batch"] == 5, "what cannot be is marked at its field and not asked"
    page.fill("#n-sequence", "99999999")
    page.press("#n-sequence", "Enter")
    assert "at most" in page.evaluate("document.querySelector('#n-sequence').validationMessage")
    assert not page.inner_text("#sentence").startswith("This cannot")


SHOWN = """() => [...document.querySelectorAll("#controls select")].map(one =>
    [one.id, one.selectedIndex >= 0 ? one.options[one.selectedIndex].text : ""])"""


def test_every_select_shows_its_value(page, server):
    opened(page, server)
    shown = dict(page.evaluate(SHOWN))
    assert all(shown.values()), shown
    assert shown["c-keep_activations"] == "computed again in backward"
    for select in shown:
        if select in ("c-model", "c-machine"):
            continue
        options = page.locator(f"#{select} option").all_text_contents()
        page.evaluate(
            """([id, i]) => { const one = document.getElementById(id); one.selectedIndex = i;
            one.dispatchEvent(new Event("change")); }""",
            [select, 1],
        )
        assert dict(page.evaluate(SHOWN))[select] == options[1]
    opened(page, server, ASKED + "&keep_activations=true")
    assert dict(page.evaluate(SHOWN))["c-keep_activations"] == "kept"


def test_a_plan_file_is_taken_for_a_plan_and_a_profile_for_none(page, server, tmp_path):
    asked = {"model": "Llama 3.2 1B", "machine": "rtx4090-x4", "gpus": 1}
    plan = server.post("/answer", {**asked, "peers": False}).json()["plan"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    opened(page, server)
    page.click("#upload summary")
    with page.expect_response(lambda r: '"ways"' in (r.request.post_data or "")):
        page.set_input_files("#file", path)
    page.wait_for_function("() => document.querySelector('#effort').textContent === 'This plan comes from plan.json.'")
    assert "The page shows the plan of plan.json" in page.inner_text("#file-told")
    settled(page)
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"layers": [1], "subgroups": [1]}))
    page.set_input_files("#file", path)
    page.wait_for_function("() => document.querySelector('#file-told').textContent.includes('tune serve --show')")


def test_an_uploaded_machine_is_listed_and_deleted_on_the_page(page, server):
    machine = server.client.get("/machines/rtx4090").json()
    server.post("/machines", {**machine, "name": "desk 4"})
    page.goto(server.url + "/?view=work")
    card = page.locator("[data-machine='desk 4']")
    card.get_by_role("button").click()
    card.get_by_role("button").click()
    card.wait_for(state="detached")
    assert server.client.get("/machines/desk%204").status_code == 404


def test_where_offloading_is_not_advised_sentence_tile_timeline_and_button_agree(page, server):
    opened(page, server, "/?model=Llama+3.2+1B&machine=h200")
    assert page.inner_text("#sentence").startswith("Do not offload")
    assert "not offloading" in page.inner_text("#tiles")
    assert "Not offloading" in page.inner_text("#memory .legend")
    assert "Plan" not in page.inner_text("#memory .legend")
    assert page.locator("#table tr.chosen").all_inner_texts()[0].startswith("No offload")
    assert page.locator("#memory .legend .line-no-offload").count() == 1
    page.click("#use summary")
    assert "offload" not in page.inner_text("#use-json")
    assert page.inner_text("#use-command") == "python train.py --deepspeed ds.json"
    button = page.locator("#save-plan")
    assert "primary" not in button.get_attribute("class").split()
    assert "anyway" in button.inner_text()


def test_where_stock_does_not_fit_nothing_is_a_multiple_of_its_speed(page, server):
    with page.expect_response(lambda r: r.url.endswith("/answer")) as first:
        opened(page, server, "/?model=Llama+3+8B&machine=rtx4090")
    plan = first.value.json()["plan"]
    assert f" {len(plan['subgroups'])} subgroups" in page.inner_text("#context"), "those that the notes speak of"
    stock, planned = page.locator("#timelines .entry-note").all_text_contents()
    assert stock.endswith(", does not fit")
    assert plan["prediction"]["clip_rate"]
    assert planned.endswith(" if the step does not clip")
    assert "Stock DeepSpeed does not fit: it needs" in page.inner_text("#sentence")
    assert "does not fit" in page.inner_text("#tiles")
    settled(page)
    assert "×" not in page.inner_text("#table")
    assert "Against stock" not in page.inner_text("#table")


def test_nothing_is_cut_where_scrollbars_take_room(browser, server):
    """Check at a small width, with scrollbars as most desktops show them, that no control and no name is cut."""
    about = {"machine": "rtx4090", "model": "Llama 3.2 1B", "sequence": 256, "name": "W" * 80}
    job = server.post("/jobs/what-if", {**about, "strategies": ["zero3_offload"]}).json()
    shown = browser.browser_type.launch(executable_path=CHROMIUM, args=FLAGS, ignore_default_args=["--hide-scrollbars"])
    page = shown.new_page(viewport={"width": 1024, "height": 768})
    page.set_default_timeout(PATIENCE_MS)
    page.add_init_script(QUICK_ANSWERS)
    opened(page, server)
    for summary in page.locator(".controls details:not([open]) > summary").all()[::-1]:
        summary.click()
    assert page.evaluate("innerWidth > document.documentElement.clientWidth"), "this browser shows no scrollbars"
    beyond = "one => [one.scrollWidth, one.clientWidth]"
    inside, room = page.locator("#controls").evaluate(beyond)
    assert inside <= room
    assert not page.evaluate(CUT_PLACEHOLDERS)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{server.url}/?job={job['id']}")
    page.wait_for_selector("#opened-title:has-text('WWW')")
    inside, room = page.locator("html").evaluate(beyond)
    assert inside <= room
    shown.close()


def test_a_plan_comes_with_what_to_type(page, server):
    with page.expect_request(lambda r: '"timelines":false' in (r.post_data or "")) as second:
        opened(page, server)
    assert second.value.post_data_json["plan"], "the plan of the first answer need not be searched again"
    page.click("#use summary")
    assert page.inner_text("#use-command").startswith("tune run -- ")
    assert json.loads(page.inner_text("#use-json"))["ebbtide"] == {"plan": "plan.json"}
    with page.expect_download() as download:
        page.click("#use-config")
    assert download.value.suggested_filename == "ds.json"
    assert json.loads(download.value.path().read_text())["zero_optimization"]["stage"] == 3


# The dark scheme of the style sheet changes colors only, at all widths. So only the rules about colors can fail.
RULES = {
    "light": "{resultTypes: ['violations']}",
    "dark": "{resultTypes: ['violations'], runOnly: ['color-contrast', 'link-in-text-block']}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "schemes"), [(390, ("light",)), (1440, ("light", "dark"))])
def test_no_serious_fault_of_access_and_no_sideways_scrolling(browser, server, width, schemes):
    context = browser.new_context(viewport={"width": width, "height": 900}, bypass_csp=True)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(QUICK_ANSWERS)
    page, missing = context.new_page(), []
    page.on("requestfailed", lambda request: missing.append((request.url, request.failure)))
    page.on("response", lambda r: missing.append((r.url, r.status)) if r.status >= 400 else None)
    opened(page, server, f"{ASKED}&pin=model%3DLlama%2B3%2B8B%26machine%3Drtx4090")
    styled = page.evaluate("getComputedStyle(document.body).display")
    # The page was once seen without its style. This shows which file was missing.
    assert (styled, missing) == ("flex", [])
    page.click("#sweep summary")
    page.click("#upload summary")
    page.add_script_tag(path=str(AXE))
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        for view in ("what-if", "work", "run"):
            page.click(f"#tab-{view}" if view != "run" else "#runs .card-title a")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, page.evaluate(BEYOND, width))
            found = page.evaluate(f"axe.run(document, {RULES[scheme]})")
            serious = [
                f"{v['id']}: {v['nodes'][0]['html'][:120]}"
                for v in found["violations"]
                if v["impact"] in ("serious", "critical")
            ]
            assert not serious, (scheme, view, serious)
            _photograph(page, f"{view}_{width}_{scheme}")
    context.close()


def _photograph(page, name):
    folder = os.environ.get("EBBTIDE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
