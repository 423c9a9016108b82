"""Every page in a real browser: what it shows, live, by keyboard, in both themes, on a phone, and with hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from served import Dashboard, serving
from written_run import RecordedRun, ids_of, trajectory

from roll_flash.diagnosis import diagnose
from roll_flash.monitor.episode_files.steps import step_file
from roll_flash.monitor.episodes import read_episodes
from roll_flash.monitor.json_lines import JsonLinesFile
from roll_flash.monitor.status import new_status, write
from roll_flash.run.learner_logprobs import write_logprobs
from roll_flash.types import Task

HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title=2</script><style>*{display:none}</style>'
VIEWS: dict[str, dict[str, Any]] = {
    "runs": {},
    "overview": {"run": "recorded"},
    "episodes": {"run": "recorded", "view": "episodes"},
    "episode": {"run": "recorded", "view": "episode", "id": "g00000001-r1"},
    "group": {"run": "recorded", "view": "group", "group": "g00000001"},
    "timeline": {"run": "recorded", "view": "timeline"},
    "failures": {"run": "recorded", "view": "failures"},
    "compare": {"run": ["recorded", "seed-2"], "view": "compare"},
    "evaluation": {"run": "recorded/step_2", "view": "overview"},
}
"""The last two need `others`."""


@pytest.fixture
def dashboard(run: RecordedRun) -> Iterator[Dashboard]:
    run.fail("env_error", "the door is stuck")
    with serving(run.folder.parent) as dashboard:
        yield dashboard


@pytest.fixture
def others(run: RecordedRun) -> None:
    """A run with another seed, and an evaluation."""
    other = RecordedRun(run.folder.parent, "seed-2", seed=2)
    other.step()
    other.close()
    run.evaluation(2)


def show(page: Page, dashboard: Dashboard, view: str, **query: Any) -> None:
    shown = {**VIEWS.get(view, {}), **query}
    page.goto(dashboard.address(**shown))
    expect(page.locator("main")).to_have_attribute("data-shown", shown.get("view", view))


def test_the_list_of_runs_leads_to_a_run(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "runs")
    page.get_by_role("link", name="recorded").click()
    expect(page.get_by_role("heading", name="recorded", exact=True)).to_be_visible()
    assert page.url.endswith("?run=recorded&view=overview"), "the token is not in the address, the state is"
    expect(page.locator(".card").first).to_contain_text("3 / 20")


def test_charts_show_the_metrics_and_any_other_can_be_added(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "overview")
    charts = page.locator("figure.chart")
    expect(charts.filter(has_text="Reward and success").locator("canvas")).to_be_visible()
    expect(charts.filter(has_text="Staleness").locator(".legend")).to_contain_text("largest 1")
    page.get_by_label("Chart another metric").fill("step_s")
    page.get_by_role("button", name="Add").click()
    expect(page.locator("figure.chart", has=page.get_by_role("heading", name="step_s"))).to_be_visible()
    assert "metric=step_s" in page.url
    page.get_by_text("Config", exact=True).click()
    expect(page.get_by_role("region", name="config")).to_contain_text("scheduler.async_ratio")


def test_a_run_that_goes_on_is_followed(page: Page, dashboard: Dashboard, run: RecordedRun) -> None:
    show(page, dashboard, "overview")
    expect(page.locator(".badge.live")).to_have_text("running")
    run.step()
    expect(page.locator(".card").first).to_contain_text("4 / 20")
    expect(page.locator(".card", has_text="episodes")).to_contain_text("17")
    show(page, dashboard, "episodes")
    expect(page.locator("main")).to_contain_text("17 of 17")
    run.step()
    expect(page.locator("main")).to_contain_text("21 of 21")


def test_the_overview_says_what_the_run_does_now(page: Page, dashboard: Dashboard, run: RecordedRun) -> None:
    status = replace(
        new_status("recorded", 20), state="running", waits_for="2 groups", episodes={"model": 3, "queued": 0}
    )
    write(run.folder, status)
    show(page, dashboard, "overview")
    now = page.locator("section", has=page.get_by_role("heading", name="Now"))
    expect(now).to_contain_text("The step waits for 2 groups.")
    expect(now).to_contain_text("model 3")
    write(run.folder, replace(status, state="failed", error=HOSTILE))
    run.step()
    expect(now).to_contain_text(HOSTILE)
    expect(page.locator("header .badge")).to_have_text("failed")


def test_an_overview_that_was_opened_before_the_run_said_anything_follows_it_to_its_end(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    show(page, dashboard, "overview")
    now = page.locator("section", has=page.get_by_role("heading", name="Now"))
    expect(now).to_have_count(0)
    status = new_status("recorded", 20)
    write(run.folder, replace(status, state="running", waits_for="2 groups"))
    expect(now).to_contain_text("The step waits for 2 groups.")
    run.evaluation(3)
    (run.folder / "summary.json").write_text('{"steps": 4}')
    write(run.folder, replace(status, state="done"))
    expect(page.locator(".card").first).to_contain_text("done")
    expect(page.get_by_role("link", name="recorded/step_3")).to_be_visible()
    expect(page.get_by_role("heading", name="Summary")).to_be_visible()


def test_the_overview_names_what_goes_wrong_while_the_run_goes_on(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    page.clock.install()
    health = page.locator("section", has=page.get_by_role("heading", name="Health"))
    show(page, dashboard, "overview")
    expect(health).to_contain_text("No rule of `roll-flash diagnose` finds a problem.")
    for step in range(20):
        same = [trajectory(f"same-{step}-{n}", f"g1{step:07d}", ["no"], reward=0.0) for n in range(4)]
        run.step(same, **dict.fromkeys(("reward_min", "reward_max", "reward_std_in_group"), 0.0))
    names = [finding.name for finding in diagnose(run.folder)]
    assert "no-reward-variance" in names
    page.clock.fast_forward(20_000)
    for name in names:
        expect(health).to_contain_text(name)


def test_episodes_are_filtered_and_the_address_keeps_the_filter(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "episodes")
    expect(page.locator("main")).to_contain_text("13 of 13")
    page.get_by_label("Text").fill("answer is 42")
    expect(page.locator("main")).to_contain_text("6 of 13")
    page.get_by_label("Step from").fill("2")
    expect(page.locator("main")).to_contain_text("2 of 13")
    page.reload()
    expect(page.locator("main")).to_contain_text("2 of 13")
    expect(page.get_by_label("Text")).to_have_value("answer is 42")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("main")).to_contain_text("13 of 13")
    page.get_by_label("Outcome").select_option("failed")
    expect(page.locator(".rows")).to_contain_text("env_error")
    expect(page.locator("main")).to_contain_text("1 of 13")


def test_an_environment_from_a_file_is_shown_without_the_folders_of_the_file(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    env = "/home/me/project/maze.py:Maze-v0"
    run.step([trajectory("from-a-file", "g00000008", ["left"], task=Task(f"{env}:7", env, 7, {}))])
    show(page, dashboard, "episodes", env=env)
    expect(page.locator("main")).to_contain_text("1 of 14")
    expect(page.locator(".rows .row").last).to_contain_text(re.compile(r"^maze\.py:Maze-v0:7maze\.py:Maze-v0"))
    page.locator(".rows a").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("maze.py:Maze-v0:7")


def test_a_long_table_has_only_the_rows_that_are_seen(page: Page, dashboard: Dashboard, run: RecordedRun) -> None:
    run.step([trajectory(f"many-{n:04}", "g00000007", ["a" * (n % 50 + 1)], reward=n / 1000) for n in range(1000)])
    show(page, dashboard, "episodes", sort="reward", descending="true")
    expect(page.locator("main")).to_contain_text("1,013 of 1,013")
    assert page.locator(".scroll .row").count() < 80
    page.locator(".scroll").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    expect(page.locator(".scroll .row").last).to_contain_text("env_error")


def test_the_table_can_be_used_without_a_mouse(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "episodes")
    page.get_by_role("link", name="Skip to the content").focus()
    page.locator(".scroll").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    focused = page.locator(".scroll a:focus")
    expect(focused).to_have_attribute("data-row", "2")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_have_attribute("data-shown", "episode")
    page.go_back()
    expect(page.locator("main")).to_have_attribute("data-shown", "episodes")


def test_an_episode_shows_its_tokens_in_colours_that_can_be_chosen(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "episode")
    tokens = page.locator("pre.tokens")
    expect(tokens).to_have_count(2)
    expect(tokens.last).to_have_text("The answer is 42.")
    assert {"bad0", "bad3"} <= set(tokens.last.locator("span").evaluate_all("all => all.map(one => one.className)"))
    page.get_by_label("age", exact=True).check()
    expect(tokens.last.locator("span").first).to_have_class("age1")
    tokens.last.locator("span").first.hover()
    expect(page.locator(".token-detail")).to_contain_text("version 0 · age 1")
    tokens.last.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-detail")).to_contain_text(f"token {ids_of('The')[1]} ·")
    assert "colour=age" in page.url
    page.get_by_label("advantage").check()
    expect(tokens.last.locator("span").first).to_have_class(re.compile("up"))
    expect(page.get_by_role("region", name="rewards")).to_contain_text("format")
    expect(page.get_by_role("region", name="tools")).to_contain_text("shell")


def test_tokens_are_coloured_by_the_difference_of_learner_and_sampler_where_it_is_known(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    show(page, dashboard, "episode")
    expect(page.locator("pre.tokens")).to_have_count(2)
    expect(page.get_by_label("learner minus sampler")).to_have_count(0)
    (record,) = [
        each for each in read_episodes(step_file(run.run_dir.episodes, 1)) if each["episode_id"].endswith("r1")
    ]
    said = np.array([value for value, own in zip(record["logprobs"], record["policy_mask"], strict=True) if own])
    said[0] += 0.4
    said[1] -= 2.0
    write_logprobs(run.folder / "logs", 2, {(record["episode_id"], 0): said.astype(np.float32)})
    page.reload()
    page.get_by_label("learner minus sampler").check()
    tokens = page.locator("pre.tokens").first.locator("span")
    expect(tokens.nth(0)).to_have_class("up2")
    expect(tokens.nth(1)).to_have_class("bad5")
    tokens.nth(1).hover()
    expect(page.locator(".token-detail")).to_contain_text("learner minus sampler −2")


def test_a_reward_that_stages_changed_is_shown_beside_that_of_the_environment(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    show(page, dashboard, "episode")
    expect(page.get_by_role("region", name="rewards")).not_to_contain_text("as trained")
    run.step([trajectory(f"judged-{n}", "g00000009", ["fine"], reward=0.25) for n in range(2)], stages_add=0.5)
    show(page, dashboard, "episode", id="judged-0")
    expect(page.get_by_role("region", name="rewards")).to_contain_text("as trained, after stages0.750")


def test_tokens_without_a_tokenizer_are_text_first_and_numbers_where_a_colour_is_chosen(
    page: Page, dashboard: Dashboard, others: None
) -> None:
    show(page, dashboard, "episode", run="seed-2", id="g00000000-r1")
    expect(page.locator(".conversation")).to_contain_text("The answer is 42.")
    page.get_by_label("log-probability").check()
    expect(page.locator(".conversation")).to_contain_text("Shown as numbers: the run has no tokenizer yet")
    expect(page.locator("pre.tokens")).to_have_count(2)


def test_an_evaluation_opens_in_the_same_pages(page: Page, dashboard: Dashboard, others: None) -> None:
    show(page, dashboard, "overview")
    page.get_by_role("link", name="recorded/step_2").click()
    expect(page.get_by_role("region", name="scores")).to_contain_text("0.200 to 0.800")
    page.get_by_role("link", name="Episodes").click()
    expect(page.locator("main")).to_contain_text("4 of 4")
    page.locator(".scroll a").first.click()
    expect(page.locator("pre.tokens").last).to_contain_text("The answer is")


def test_commands_in_the_sandbox_are_shown_with_their_output(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    commands = [{"command": "ls -la", "exit_code": 2, "seconds": 0.25, "output": "no such folder"}]
    run.step([trajectory("commands", "g00000008", ["ls"], info={"sandbox_commands": commands})])
    show(page, dashboard, "episode", id="commands")
    page.get_by_text("ls -la", exact=True).click()
    expect(page.locator("section", has=page.get_by_role("heading", name="Commands in the sandbox"))).to_contain_text(
        "no such folder"
    )
    expect(page.get_by_text("exit 2")).to_be_visible()


def test_a_group_shows_its_replicas_and_where_they_first_differ(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "group")
    # Turns count from 0, as in `replay --at-turn`.
    expect(page.locator("main")).to_contain_text("The replicas first differ in turn 1, at character 15.")
    expect(page.locator(".replica")).to_have_count(4)
    expect(page.get_by_role("link", name="Replica r2")).to_be_visible()
    expect(page.locator("mark.fork")).to_have_count(4)


def test_the_timeline_zooms_to_a_turn_by_keys_and_opens_an_episode(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "timeline")
    expect(page.get_by_role("region", name="busy")).to_contain_text("learner: gradient")
    expect(page.get_by_role("region", name="busy")).to_contain_text("stage judge")
    expect(page.get_by_role("region", name="gaps")).to_contain_text("6.00 s")
    canvas = page.locator(".canvas canvas")
    canvas.focus()
    for _ in range(4):
        page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"begin=[\d.]+&end=[\d.]+"))
    address = page.url
    page.reload()
    expect(page.locator("main")).to_have_attribute("data-shown", "timeline")
    assert page.url == address
    page.get_by_role("button", name="All").click()
    expect(page).not_to_have_url(re.compile("begin="))
    page.get_by_role("region", name="stragglers").get_by_role("link").first.click()
    expect(page.locator("main")).to_have_attribute("data-shown", "episode")


def test_the_mouse_names_what_it_is_over_and_a_click_opens_it(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "timeline")
    canvas = page.locator(".canvas canvas")
    box = canvas.bounding_box()
    assert box is not None
    for y in range(int(box["height"]) - 8, 60, -8):
        canvas.hover(position={"x": 170, "y": y})
        if page.locator(".tip").is_visible() and "turn" in page.locator(".tip").inner_text():
            break
    expect(page.locator(".tip")).to_contain_text("turn 0 of g00000000-r")
    canvas.click(position={"x": 170, "y": y})
    expect(page.locator("main")).to_have_attribute("data-shown", "episode")


def test_failures_lead_to_their_episodes(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "failures")
    page.get_by_role("link", name="the door is stuck").click()
    expect(page.locator(".notice.warn")).to_contain_text("turn 1, attempt 1: the door is stuck")


def test_runs_are_compared_with_a_band_over_seeds_and_the_keys_that_differ(
    page: Page, dashboard: Dashboard, run: RecordedRun
) -> None:
    for name, settings in (("seed-2", {"seed": 2}), ("hotter", {"rollout": {"temperature": 0.7}})):
        other = RecordedRun(run.folder.parent, name, **settings)
        other.step(reward=0.2)
        other.close()
    show(page, dashboard, "runs")
    for name in ("recorded", "seed-2", "hotter"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare 3").click()
    chart = page.locator("figure.chart", has_text="reward").first
    expect(chart.locator(".legend")).to_contain_text("recorded and 1 other seed")
    expect(chart.locator(".legend")).to_contain_text("hotter")
    differences = page.get_by_role("region", name="differences")
    expect(differences).to_contain_text("rollout.temperature")
    expect(differences).not_to_contain_text("scheduler.async_ratio")


def test_what_a_model_writes_never_becomes_markup(page: Page, dashboard: Dashboard, run: RecordedRun) -> None:
    hostile = trajectory(
        HOSTILE, HOSTILE, [HOSTILE, "</pre></main>" + HOSTILE], prompt=HOSTILE, observation=HOSTILE, end=HOSTILE,
        info={
            "rewards": {HOSTILE: HOSTILE}, "tools": {HOSTILE: {"calls": HOSTILE}},
            "sandbox_commands": [{"command": HOSTILE, "output": HOSTILE, "exit_code": HOSTILE}],
        },
    )  # fmt: skip
    run.step([hostile, trajectory("other", HOSTILE, ["fine"])], **{HOSTILE: 1.0})
    run.fail(HOSTILE, HOSTILE, "failed-2")
    file = JsonLinesFile(run.folder / "logs" / "timeline.jsonl")
    work, stage = [HOSTILE, 1.76e9, 1.76e9 + 5, 3], [HOSTILE, 1.76e9, 1.76e9 + 5, HOSTILE]
    file.write({"step": 9, "started_s": 1.76e9, "ended_s": 1.76e9 + 9, "learner": [work], "stages": [stage]})
    file.close()
    for query in (
        {"view": "episode", "id": HOSTILE}, {"view": "group", "group": HOSTILE}, {"view": "episodes", "text": HOSTILE},
        {"view": "failures"}, {"view": "timeline"}, {"view": "overview", "metric": HOSTILE}, {"view": HOSTILE},
    ):  # fmt: skip
        page.goto(dashboard.address(run="recorded", **query))
        expect(page.locator("main")).to_have_attribute("data-shown", query["view"])
        assert not page.locator("main img, main script, main style, header script").count()
        assert "ROLL Flash" in page.title()
    page.goto(dashboard.address(run="recorded", view="episode", id=HOSTILE))
    expect(page.locator("pre", has_text="onerror").first).to_be_visible()
    assert page.locator("pre.tokens").count() == 2


def test_a_run_that_does_not_exist_and_a_server_that_ended_are_one_line(page: Page, run: RecordedRun) -> None:
    with serving(run.folder) as dashboard:
        page.goto(dashboard.address(run="none"))
        expect(page.get_by_role("alert")).to_contain_text("none: no run or evaluation of this name")
        show(page, dashboard, "overview")
        expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.get_by_role("alert")).to_contain_text("the dashboard does not answer")


def test_a_browser_that_goes_away_disturbs_nobody(browser: Browser, page: Page, dashboard: Dashboard) -> None:
    other = browser.new_page()
    other.goto(dashboard.address(run="recorded"), wait_until="commit")
    other.close()
    show(page, dashboard, "overview")


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("view", VIEWS)
def test_a_page_can_be_saved_as_one_file_that_needs_nothing_else(
    page: Page, dashboard: Dashboard, tmp_path: Path, browser: Browser, view: str
) -> None:
    show(page, dashboard, view)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save page").click()
    path = tmp_path / "saved.html"
    download.value.save_as(path)
    text = path.read_text()
    assert "<script" not in text
    assert dashboard.token not in text
    saved = browser.new_page()
    requests: list[str] = []
    saved.on("request", lambda request: requests.append(request.url))
    saved.goto(path.as_uri())
    assert saved.locator("h1").inner_text() == page.locator("h1").inner_text()
    assert saved.locator("main").inner_text()
    if view in ("overview", "timeline", "compare"):
        assert saved.locator("main img").first.evaluate("image => image.naturalWidth") > 100
    if view == "episodes":
        assert saved.locator(".scroll .row").count() == 13
    assert all(url.startswith(("file:", "data:")) for url in requests)
    saved.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("view", VIEWS)
def test_no_page_has_a_serious_problem_of_accessibility(
    page: Page, dashboard: Dashboard, view: str, theme: Any
) -> None:
    page.emulate_media(color_scheme=theme)
    show(page, dashboard, view)
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
    assert not serious


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("view", VIEWS)
def test_a_page_fits_a_phone(page: Page, dashboard: Dashboard, view: str) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    show(page, dashboard, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_the_theme_can_be_chosen_and_is_kept(page: Page, dashboard: Dashboard) -> None:
    show(page, dashboard, "overview")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    for _ in range(2):
        page.get_by_role("button", name="Colours").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light
