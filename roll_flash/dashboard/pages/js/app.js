// The address holds the state: `view` and its parameters. Each view is a module with `show(main, query, page)`, which may
// return `update()` (called when the run has written something) and `forExport()` (called before a page is saved).

import { get } from "./api.js";
import { badge, h, link, STATES } from "./dom.js";
import { exportPage } from "./export.js";
import * as compare from "./compare.js";
import * as episode from "./episode.js";
import * as episodes from "./episodes.js";
import * as failures from "./failures.js";
import * as group from "./group.js";
import * as overview from "./overview.js";
import * as runs from "./runs.js";
import * as timeline from "./timeline.js";

const VIEWS = { runs, overview, episodes, episode, group, timeline, failures, compare };
const TABS = [["overview", "Overview"], ["episodes", "Episodes"], ["timeline", "Timeline"], ["failures", "Failures"]];
const LOOK_MS = 2000;
const THEMES = ["auto", "light", "dark"];

const main = document.getElementById("main");
const problem = document.getElementById("problem");
const status = document.getElementById("status");
let shown = null; // {query, view, mark, abort}

const page = {
  // Change the address without showing the view anew: its state is already on the page.
  remember(query) {
    history.replaceState(null, "", `?${query}`);
    if (shown) shown.query = query;
  },
  go(address) {
    history.pushState(null, "", address);
    return open();
  },
  say(text) {
    status.textContent = text;
  },
  fail,
};

function fail(error) {
  if (error.name === "AbortError") return;
  problem.textContent = error.message;
  problem.hidden = false;
}

async function open() {
  shown?.abort.abort();
  const query = new URLSearchParams(location.search);
  const name = query.get("view") ?? (query.has("run") ? "overview" : "runs");
  const mine = { query, name, view: null, mark: null, abort: new AbortController() };
  shown = mine;
  problem.hidden = true;
  page.signal = mine.abort.signal;
  drawTop(query, name, null);
  try {
    const run = query.getAll("run").length === 1 && query.get("run");
    if (run) mine.mark = (await get("mark", { run }, page.signal)).mark;
    drawTop(query, name, mine.mark);
    const view = await VIEWS[name in VIEWS ? name : "runs"].show(main, query, page);
    if (shown === mine) mine.view = view ?? {};
    main.setAttribute("data-shown", name);
  } catch (error) {
    if (shown === mine) fail(error);
  }
}

// The state of the run is the first word of its mark.
function drawTop(query, name, mark) {
  const run = query.getAll("run").length === 1 ? query.get("run") : null;
  const active = { episode: "episodes", group: "episodes" }[name] ?? name;
  const tabs = run && TABS.map(([view, title]) => {
    const tab = link({ run, view }, title);
    if (view === active) tab.setAttribute("aria-current", "page");
    return tab;
  });
  const state = mark?.split("-")[0];
  document.title = run ? `${run} · ${name} · ROLL Flash` : "ROLL Flash";
  document.getElementById("top").replaceChildren(
    h("a", { href: "?", class: "brand" }, h("img", { src: "/pages/icon.svg", alt: "", width: 20, height: 20 }), "ROLL Flash"),
    run ? h("span", { class: "where" }, run, state ? badge(state, STATES[state]) : null) : h("span", { class: "where" }),
    run ? h("nav", { "aria-label": "Views of the run" }, tabs) : h("span", { class: "space" }),
    h("button", { type: "button", onclick: () => exportPage(shown?.view, page).catch(fail) }, "Save page"),
    h("button", { type: "button", onclick: changeTheme, "aria-label": "Colours: automatic, light or dark" }, theme()),
  );
}

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function changeTheme(event) {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  event.target.textContent = next;
  document.dispatchEvent(new Event("theme"));
}

// A run that goes on: views update themselves when its files have changed. Nothing is asked for a page that is hidden.
async function look() {
  const mine = shown;
  const run = mine?.query.getAll("run").length === 1 && mine.query.get("run");
  if (!document.hidden && mine?.view?.update) {
    try {
      const mark = run ? (await get("mark", { run }, mine.abort.signal)).mark : null;
      if (shown === mine && (mark === null || mark !== mine.mark)) {
        mine.mark = mark;
        if (mark) drawTop(mine.query, mine.name, mark);
        await mine.view.update();
      }
      if (shown === mine) problem.hidden = true;
    } catch (error) {
      if (shown === mine) fail(error);
    }
  }
  setTimeout(look, LOOK_MS);
}

document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href^='?']");
  if (!anchor || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  scrollTo(0, 0);
  page.go(anchor.getAttribute("href")).then(() => main.focus({ preventScroll: true }));
});
addEventListener("popstate", open);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
const saved = localStorage.getItem("theme");
if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
open();
setTimeout(look, LOOK_MS);
