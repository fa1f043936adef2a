"""The page of a run in a real browser: pointing, zooming, filtering, images, and nothing fetched from outside.

`make browser` runs this file. It needs a Chromium on the machine (Debian: apt-get install chromium) and the package
playwright, which drives it.
"""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

from rlkit.data import prompt_sample
from rlkit.data.media import Audio
from rlkit.report import prompt_record, write_page, write_report
from rlkit.tracking import Run

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVIL = '<script>document.title = "taken"</script><img src="https://example.org/x.png" onerror="document.title=1">'
STEPS = 40


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = [path for name in names if (path := shutil.which(name))]
    assert found, f"expected a browser, one of {', '.join(names)}, on PATH, got none; Debian: apt-get install chromium"
    return found[0]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser):
    """A page that fails its test if a script on it fails, or if it asks for anything but itself."""
    opened = browser.new_page(viewport={"width": 1300, "height": 900})
    wrong = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on(
        "request", lambda request: None if request.url.startswith(("file://", "data:")) else wrong.append(request.url)
    )
    yield opened
    opened.close()
    assert wrong == []


def group(out: Path, step: int, prompt: int, rewards: list, text: str = "It is {}.") -> dict:
    image = Image.new("RGB", (40, 30), (step % 256, 100 * prompt, 0))
    row = {"question": f"Which colour is picture {prompt}? {EVIL}", "answer": "red"}
    sample = prompt_sample([1, 2], row=row, images=[image], group_id=prompt)
    samples = [replace(sample, text=text.format(x), reward=x, mask=[False, True]) for x in rewards]
    return prompt_record(out, samples, "training", step, {"colour": rewards})


def a_run(out: Path, *, height: float = 1.0, steps: int = STEPS, lr: float = 1e-3) -> Run:
    run = Run(out, {"lr": lr, "steps": STEPS, "note": f"</script>{EVIL}"})
    for step in range(steps):
        run.keep_responses([group(out, step, 0, [0.0, 0.0]), group(out, step, 1, [step / STEPS, 1.0], EVIL + " {}")])
        run.log(
            step, {"reward/mean": height * step / STEPS, "loss": 1.0, "mismatch/abs_dlogp": 1e-5, "time/train": 2.0}
        )
    run.log_evaluation(accuracy_before=0.125, accuracy_after=0.875)
    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    a_run(out)
    image = Image.new("RGB", (600, 400), "red")
    heldout = prompt_sample([1], row={"question": "held?", "answer": "yes"}, images=[image])
    return write_report(out, [replace(heldout, text="no", reward=0.0)], title=f"a run {EVIL}")


def open_page(page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector(".chart canvas")


def point_at(page, metric: str, share: float) -> str:
    """Move the pointer to this share of the width of a curve; the values that its legend then shows."""
    over = page.locator(f'.chart[data-metric="{metric}"] .u-over')
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    page.wait_for_timeout(100)
    return " ".join(page.locator(f'.chart[data-metric="{metric}"] .u-value:visible').all_inner_texts())


def test_curves_stand_in_groups_and_can_be_pointed_at(page, report):
    open_page(page, report)
    titles = [text.split()[0] for text in page.locator("details.group > summary").all_inner_texts()]
    assert titles == ["Reward", "Optimisation", "Sampler", "Time"]
    assert point_at(page, "reward/mean", 0.5).split()[0] in ("19", "20")  # of steps 0 to 39
    step, value, *_ = point_at(page, "reward/mean", 0.999).split()
    assert (step, value) == ("39", "0.975")
    shown = page.locator('.chart[data-metric="loss"] .u-value').all_inner_texts()
    assert shown[0] == "39"  # all curves point at the same step


def test_a_part_of_the_run_is_zoomed_into_and_stays_so_over_a_reload(page, report):
    open_page(page, report)

    def ends():
        return [point_at(page, "loss", share).split()[0] for share in (0.001, 0.999)]

    assert ends() == ["0", "39"]
    box = page.locator('.chart[data-metric="reward/mean"] .u-over').bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 40, steps=5)
    page.mouse.up()
    page.wait_for_timeout(200)
    first, last = map(int, ends())  # of another curve
    assert 8 <= first <= 11 and 28 <= last <= 31
    page.reload()
    page.wait_for_selector(".chart canvas")
    assert list(map(int, ends())) == [first, last]
    page.get_by_role("button", name="whole run").click()
    assert ends() == ["0", "39"]


def test_responses_are_found_by_step_reward_and_prompt(page, report):
    open_page(page, report)
    count = page.locator("#response-count")
    assert count.inner_text() == "81 of the 81 prompts on this page."
    page.select_option("#response-kind", "held-out")
    assert count.inner_text().startswith("1 of 81") and "held?" in page.locator(".prompt").inner_text()
    page.get_by_role("button", name="show all").click()
    page.select_option("#response-step", "7")
    assert count.inner_text().startswith("2 of 81") and page.locator(".prompt").count() == 2
    page.select_option("#response-rewards", "differ")
    card = page.locator(".prompt")
    assert card.count() == 1 and "picture 1" in card.inner_text() and "0.175" in card.inner_text()
    page.get_by_role("button", name="show all").click()
    page.fill("#reward-low", "0.95")
    assert count.inner_text().startswith("4 of 81")  # (1 + step / 40) / 2 from step 36 on
    page.get_by_role("button", name="show all").click()
    page.fill("#response-text", "picture 0")
    assert count.inner_text().startswith("40 of 81")
    page.select_option("#response-order", "oldest")
    assert "step 0 " in page.locator(".prompt .where").first.inner_text()
    assert page.locator(".prompt").count() == 20
    page.get_by_role("button", name="more").click()
    assert page.locator(".prompt").count() == 40


def test_a_click_on_a_curve_shows_the_responses_of_that_step(page, report):
    open_page(page, report)
    step = point_at(page, "reward/mean", 0.3).split()[0]
    page.mouse.down()
    page.mouse.up()
    assert page.locator("#response-count").inner_text().startswith("2 of 81")
    assert all(f"step {step} " in text for text in page.locator(".prompt .where").all_inner_texts())


def test_the_places_of_one_prompt(page, tmp_path):
    run = Run(tmp_path, {})
    for step in range(6):
        run.keep_responses([{**group(tmp_path, 0, step % 2, [0.0, 1.0]), "step": step}])
        run.log(step, {"reward/mean": 0.5})
    open_page(page, write_report(tmp_path))
    page.get_by_role("button", name="this prompt in all 3 places").first.click()
    assert page.locator("#response-count").inner_text() == "3 of the 6 prompts on this page."


def test_audios_can_be_played(page, tmp_path):
    tones = [Audio(0.1 * np.sin(np.arange(16000 * n) / 9).astype("float32"), 16000) for n in (2, 31)]
    sample = prompt_sample([1], row={"question": "What is heard?", "answer": "two tones"}, audios=tones)
    run = Run(tmp_path, {})
    run.keep_responses([prompt_record(tmp_path, [replace(sample, text="one", reward=0.0)], "training", 0)])
    run.log(0, {"reward/mean": 0.5})
    page.goto(write_report(tmp_path).as_uri())
    players = page.locator(".prompt audio")
    lengths = [player.evaluate("async (one) => { await one.play(); return one.duration; }") for player in players.all()]
    assert lengths == [2, 30] and players.first.is_visible()
    text = page.locator(".prompt").inner_text()
    assert "audio of 2 s" in text and "the first 30 s of an audio of 31 s" in text


def test_text_with_html_is_shown_as_text(page, report):
    open_page(page, report)
    assert page.title() == f"a run {EVIL}" and page.locator("h1").inner_text() == f"a run {EVIL}"
    page.fill("#response-text", "onerror")
    assert any(text.startswith(EVIL) for text in page.locator(".response-text").all_inner_texts())
    assert page.locator("#responses script, #responses iframe, #responses a").count() == 0
    assert EVIL in page.locator(".prompt .question").nth(1).inner_text()
    assert EVIL.replace('"', '\\"') in page.locator("#option-list").inner_text()


def test_nothing_is_fetched_from_outside(browser, report):
    """The page asks for nothing; its policy also refuses what a script that got onto it would ask for."""
    page = browser.new_page()
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    open_page(page, report)
    page.wait_for_timeout(500)
    assert [url for url in urls if not url.startswith("data:")] == [report.as_uri()]
    refused = page.evaluate("""async () => {
        const refused = [];
        document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
        const image = new Image();
        image.src = "https://example.org/x.png";
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        const audio = new Audio("https://example.org/x.wav");
        document.body.append(image, audio, script);
        await fetch("https://example.org/").catch(() => null);
        await new Promise((done) => setTimeout(done, 200));
        return [...refused.sort(), window.ran === undefined];
    }""")
    page.close()
    assert refused == ["connect-src", "img-src", "media-src", "script-src-elem", True]


def test_images_are_there(page, report):
    open_page(page, report)
    page.wait_for_timeout(300)
    sizes = page.evaluate(
        "() => [...document.querySelectorAll('.prompt img')].map((i) => [i.naturalWidth, i.className])"
    )
    assert len(sizes) == 20 and [512, ""] in sizes and sizes.count([40, "small"]) == 19


def test_a_page_of_a_run_that_goes_on_reloads_itself(page, tmp_path, monkeypatch):
    a_run(tmp_path, steps=5)
    path = tmp_path / "report.html"
    write_page(path, [tmp_path], running=True, every=1.0)
    open_page(page, path)
    assert page.locator("#status").inner_text().startswith("Running.")
    page.fill("#metric-filter", "reward")
    Run(tmp_path, {}).log(5, {"reward/mean": 0.625})
    write_page(path, [tmp_path], running=True, every=1.0)
    page.wait_for_function("() => document.querySelector('#tiles').innerText.includes('0.625')", timeout=30000)
    page.wait_for_selector(".chart canvas")
    assert page.locator("#metric-filter").input_value() == "reward"  # what was chosen stays
    assert page.locator('.chart[data-metric="loss"]').is_hidden()
    write_page(path, [tmp_path])
    open_page(page, path)
    assert not page.locator("#status").inner_text().startswith("Running")
    monkeypatch.setattr("rlkit.report.page.time.time", lambda: 10**9)
    write_page(path, [tmp_path], running=True, every=3600.0)
    open_page(page, path)
    assert page.locator("#status").inner_text().startswith("No longer written")


def test_runs_beside_each_other(page, tmp_path):
    for name, height, lr in (("low", 0.5, 1e-4), ("high", 1.0, 1e-3)):
        a_run(tmp_path / name, height=height, lr=lr)
    command = [
        sys.executable,
        "-m",
        "rlkit.report",
        tmp_path / "low",
        tmp_path / "high",
        "--out",
        tmp_path / "both.html",
    ]
    subprocess.run(command, check=True)
    open_page(page, tmp_path / "both.html")
    values = point_at(page, "reward/mean", 0.999).split()
    assert values == ["39", "0.4875", "0.975"]
    rows = page.locator("#option-list tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["option", "lr"]
    page.select_option("#response-run", "1")
    assert page.locator("#response-count").inner_text() == "80 of the 80 prompts on this page."
