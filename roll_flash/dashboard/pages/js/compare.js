// Several runs: charts with one line per experiment, a band over its seeds, and the keys of the configs that differ.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { flat, h, link, number, panel, plain, table } from "./dom.js";
import { CHARTS } from "./overview.js";

const COLOURS = 6;

export async function show(main, query, page) {
  const names = query.getAll("run");
  const grid = h("div", { class: "grid" });
  const rest = h("div", {});
  const charts = new Map();
  main.replaceChildren(h("div", { class: "heading" }, h("h1", {}, "Compare runs"), h("p", { class: "muted" }, "Runs that differ only in their seed are one line, with a band from the lowest to the highest.")), grid, rest);
  if (names.length < 2) {
    grid.replaceChildren(h("p", { class: "notice" }, "Choose at least two runs in the list of runs."));
    return {};
  }
  const lines = CHARTS.flatMap(([title, unit, list]) => list.map(([name, label]) => ({ title: list.length > 1 ? `${title}: ${label}` : title, unit, name })));

  async function update() {
    const [list, ...runs] = await Promise.all([get("runs", {}, page.signal), ...names.map((run) => load(run, lines.map((line) => line.name), page))]);
    const experiments = groupBy(runs, (run) => list.runs.find((each) => each.name === run.name)?.experiment ?? run.name);
    for (const { title, unit, name } of lines) drawChart(title, unit, name, experiments);
    rest.replaceChildren(last(experiments, lines), differences(runs));
  }

  function drawChart(title, unit, name, experiments) {
    const shown = [...experiments.values()].filter((runs) => runs.some((run) => run.columns[name].some((value) => value !== null)));
    if (!shown.length) return;
    const data = joined(shown, name, [...experiments.values()]);
    if (charts.has(title)) return charts.get(title).set(data);
    const chart = new Chart(title, unit, data);
    charts.set(title, chart);
    grid.append(chart.element);
  }

  await update();
  return { update };
}

async function load(run, names, page) {
  const [about, metrics] = await Promise.all([get("run", { run }, page.signal), get("metrics", { run, name: names }, page.signal)]);
  return { name: run, config: flat(about.config ?? {}), steps: metrics.steps, columns: metrics.columns };
}

function groupBy(items, key) {
  const found = new Map();
  for (const item of items) found.set(key(item), [...(found.get(key(item)) ?? []), item]);
  return found;
}

function label(runs) {
  return runs.length === 1 ? runs[0].name : `${runs[0].name} and ${runs.length - 1} other ${runs.length === 2 ? "seed" : "seeds"}`;
}

// The mean of each experiment at each step that any of them has.
export function joined(experiments, name, all) {
  const steps = [...new Set(experiments.flatMap((runs) => runs.flatMap((run) => run.steps)))].sort((a, b) => a - b);
  const lines = experiments.map((runs) => {
    const tables = runs.map((run) => new Map(run.steps.map((step, i) => [step, run.columns[name][i]])));
    const values = steps.map((step) => tables.map((each) => each.get(step)).filter((value) => value !== null && value !== undefined));
    const of = (reduce) => values.map((found) => (found.length ? reduce(found) : null));
    const mean = of((found) => found.reduce((a, b) => a + b) / found.length);
    const band = runs.length > 1 ? { low: of((found) => Math.min(...found)), high: of((found) => Math.max(...found)) } : {};
    return { label: label(runs), colour: (all.indexOf(runs) % COLOURS) + 1, dashed: all.indexOf(runs) >= COLOURS, values: mean, ...band };
  });
  return { steps, lines };
}

function last(experiments, lines) {
  const head = ["experiment", "steps#", ...lines.slice(0, 4).map((line) => `${line.name}#`)];
  const rows = [...experiments.values()].map((runs) => {
    const data = lines.slice(0, 4).map((line) => joined([runs], line.name, [runs]).lines[0].values.findLast((value) => value !== null));
    return [h("span", {}, runs.map((run, i) => [i ? ", " : "", link({ run: run.name, view: "overview" }, run.name)]).flat()), number(Math.max(0, ...runs.flatMap((run) => run.steps))), ...data.map((value) => number(value ?? null))];
  });
  return panel("Last values", table(head, rows, { label: "last values" }));
}

function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const differing = keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1);
  const rows = differing.map((key) => [h("code", {}, key), ...runs.map((run) => (key in run.config ? h("code", {}, plain(run.config[key])) : "–"))]);
  return panel("Config: keys that differ", rows.length ? table(["key", ...runs.map((run) => run.name.replace(/#$/, ""))], rows, { label: "differences" }) : h("p", { class: "muted" }, "The configs are equal."));
}
