// Episodes: filters that the address holds, and a table of which only the visible rows exist.

import { get } from "./api.js";
import { brief, h, link, number, outcome, seconds } from "./dom.js";

const ROW_PX = 36;
const PAGE = 100;
const EXPORTED = 1000;
const WAIT_MS = 150;

export const COLUMNS = [
  ["task", "task", "task"], ["env", "environment", "env wide-only"], ["outcome", "outcome", "outcome"], ["reward", "reward", "number"],
  ["step", "step", "number"], ["tokens", "tokens", "number wide-only"], ["seconds", "time", "number wide-only"], ["", "trained", "fate wide-only"],
];
const FILTERS = ["env", "outcome", "success", "worker", "group", "min_reward", "max_reward", "min_step", "max_step", "min_tokens", "max_tokens", "text"];

export async function show(main, query, page) {
  const run = query.get("run");
  const counts = await get("counts", { run }, page.signal);
  const found = h("p", { class: "muted", role: "status" });
  const rows = new Rows(run, page, found);
  const form = filterForm(query, counts, () => {
    const next = new URLSearchParams({ run, view: "episodes" });
    for (const [name, value] of new FormData(form)) if (value !== "") next.set(name, value);
    for (const name of ["sort", "descending"]) if (query.has(name)) next.set(name, query.get(name));
    query = next;
    page.remember(next);
    rows.open(next);
  });
  const sortBy = (name) => {
    const isSame = query.get("sort") === name;
    query.set("sort", name);
    query.set("descending", isSame && query.get("descending") !== "false" ? "false" : "true");
    page.remember(query);
    head.replaceChildren(...headers(query, sortBy));
    rows.open(query);
  };
  const head = h("div", { class: "row head", role: "row" }, headers(query, sortBy));
  main.replaceChildren(h("div", { class: "heading" }, h("h1", {}, "Episodes"), found), form,
    h("div", { class: "panel rows", role: "table", "aria-label": "episodes" }, h("div", { role: "rowgroup" }, head), rows.element));
  await rows.open(query);
  return { update: () => rows.refresh(), forExport: () => rows.fill(EXPORTED) };
}

function headers(query, sortBy) {
  return COLUMNS.map(([name, title, kind]) => {
    const sorted = name && query.get("sort") === name ? (query.get("descending") === "false" ? "ascending" : "descending") : null;
    const text = `${title}${sorted ? (sorted === "ascending" ? " ↑" : " ↓") : ""}`;
    return h("span", { role: "columnheader", class: kind, "aria-sort": sorted }, name ? h("button", { type: "button", onclick: () => sortBy(name) }, text) : text);
  });
}

function filterForm(query, counts, changed) {
  const choices = (name, title, groups) => {
    const given = query.get(name) ?? "";
    const select = h("select", { name }, h("option", { value: "" }, "all"), groups.map(([value, text]) => h("option", { value, selected: value === given }, text)));
    return h("label", {}, title, select);
  };
  const counted = (values) => Object.entries(values).map(([name, count]) => [name, `${brief(name)} (${number(count)})`]);
  const between = (name, title) => h("fieldset", {}, h("legend", {}, title),
    h("input", { name: `min_${name}`, type: "number", step: "any", placeholder: "from", "aria-label": `${title} from`, value: query.get(`min_${name}`) ?? "" }),
    h("input", { name: `max_${name}`, type: "number", step: "any", placeholder: "to", "aria-label": `${title} to`, value: query.get(`max_${name}`) ?? "" }));
  const workers = Object.keys(counts.workers).length > 1 ? [choices("worker", "Worker", counted(counts.workers))] : [];
  const form = h("form", { class: "filters panel", role: "search" },
    h("label", { class: "text" }, "Text", h("input", { name: "text", type: "search", placeholder: "in conversations, ids, errors", maxlength: 1000, value: query.get("text") ?? "" })),
    choices("env", "Environment", counted(counts.envs)),
    choices("outcome", "Outcome", [["failed", `failed (${number(counts.failed)})`], ...counted(counts.ends), ...counted(counts.causes)]),
    choices("success", "Success", [["yes", "yes"], ["no", "no"], ["unknown", "not reported"]]),
    ...workers, between("reward", "Reward"), between("step", "Step"), between("tokens", "Tokens"),
    query.has("group") ? h("label", {}, "Group", h("input", { name: "group", value: query.get("group") })) : null,
    h("button", { type: "reset" }, "Clear"));
  let timer;
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(changed, WAIT_MS);
  };
  form.addEventListener("input", soon);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    for (const input of form.elements) if (input.name) input.value = "";
    soon();
  });
  return form;
}

class Rows {
  constructor(run, page, found) {
    this.run = run;
    this.page = page;
    this.found = found;
    this.space = h("div", { class: "space", role: "presentation" });
    this.element = h("div", { class: "scroll", tabindex: "0", role: "rowgroup" }, this.space);
    this.element.addEventListener("scroll", () => this.draw());
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.total = 0;
    this.pages = new Map();
    this.turn = 0;
  }

  async open(query) {
    this.query = query;
    this.turn += 1;
    this.element.scrollTop = 0;
    await this.refresh();
  }

  parameters(offset) {
    const selection = Object.fromEntries([...FILTERS, "sort", "descending"].map((name) => [name, this.query.get(name)]));
    return { run: this.run, ...selection, offset, limit: PAGE };
  }

  // Ask anew for what is visible, and go on searching in texts until all are searched.
  async refresh() {
    const turn = this.turn;
    for (;;) {
      const first = Math.max(0, Math.floor(this.element.scrollTop / ROW_PX / PAGE));
      let answer;
      try {
        answer = await get("episodes", this.parameters(first * PAGE), this.page.signal);
      } catch (error) {
        return this.page.fail(error);
      }
      if (turn !== this.turn) return;
      if (answer.total !== this.total) this.pages.clear();
      this.total = answer.total;
      this.pages.set(first, answer.rows);
      const searching = answer.searched < answer.episodes;
      const reading = answer.is_complete ? "" : "; the log is being read";
      this.found.textContent = answer.error || `${number(answer.total)} of ${number(answer.episodes)}${searching ? `; ${number(answer.searched)} searched` : ""}${reading}`;
      this.draw();
      if (!searching && answer.is_complete) return;
      if (!searching) await new Promise((done) => setTimeout(done, WAIT_MS));
    }
  }

  async load(number) {
    if (this.pages.has(number)) return;
    this.pages.set(number, null);
    const turn = this.turn;
    try {
      const answer = await get("episodes", this.parameters(number * PAGE), this.page.signal);
      if (turn === this.turn) this.pages.set(number, answer.rows);
    } catch (error) {
      this.pages.delete(number);
      return this.page.fail(error);
    }
    this.draw();
  }

  draw(all = 0) {
    const focused = document.activeElement?.dataset?.row;
    const first = all ? 0 : Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - 5);
    const last = all || Math.min(this.total, first + Math.ceil(this.element.clientHeight / ROW_PX) + 12);
    const shown = [];
    for (let place = first; place < last; place += 1) {
      const page = this.pages.get(Math.floor(place / PAGE));
      if (!page) this.load(Math.floor(place / PAGE));
      shown.push(this.row(place, page?.[place % PAGE]));
    }
    this.space.style.height = `${this.total * ROW_PX}px`;
    this.space.replaceChildren(...shown);
    if (focused) this.space.querySelector(`[data-row="${focused}"]`)?.focus({ preventScroll: true });
  }

  row(place, episode) {
    const cells = episode ? [
      link({ run: this.run, view: "episode", id: episode.id }, brief(episode.task)), brief(episode.env), outcome(episode), number(episode.reward), number(episode.step),
      number(episode.tokens), seconds(episode.started_s === null ? null : episode.finished_s - episode.started_s), fate(episode),
    ] : [h("span", { class: "muted" }, "…")];
    const row = h("div", { class: "row", role: "row" }, cells.map((cell, column) => h("span", { role: "cell", class: COLUMNS[column][2] }, cell)));
    row.style.top = `${place * ROW_PX}px`;
    const anchor = row.querySelector("a");
    if (anchor) anchor.dataset.row = place;
    return row;
  }

  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (!move || !this.total) return;
    event.preventDefault();
    const now = document.activeElement?.dataset?.row;
    const next = Math.min(this.total - 1, Math.max(0, now === undefined ? Math.floor(this.element.scrollTop / ROW_PX) : Number(now) + move));
    const top = next * ROW_PX, height = this.element.clientHeight;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (top + ROW_PX > this.element.scrollTop + height) this.element.scrollTop = top + ROW_PX - height;
    this.draw();
    this.space.querySelector(`[data-row="${next}"]`)?.focus({ preventScroll: true });
  }

  async fill(most) {
    const wanted = Math.min(this.total, most);
    for (let number = 0; number * PAGE < wanted; number += 1) await this.load(number);
    this.draw(wanted);
    this.space.style.height = `${wanted * ROW_PX}px`;
    return wanted < this.total ? `the first ${wanted} of ${this.total} episodes` : "";
  }
}

export function fate(episode) {
  if (episode.trained) return `step ${episode.trained}`;
  return episode.dropped ? `dropped: ${episode.dropped}` : "–";
}
