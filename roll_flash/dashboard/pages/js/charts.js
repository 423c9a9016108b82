// Line charts over training steps, with legends of our own: the library would put labels into the page as markup.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { h, number } from "./dom.js";

const HEIGHT = 190;
const STEPS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
const HIDDEN = { stroke: "transparent", spanGaps: true, points: { show: false } };
const alive = new Set();

// A colour of the style sheet, as it is now.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// data: {steps, lines: [{label, values, dashed, colour (1..6), low, high}]}; `low` and `high` are a band around a line.
export class Chart {
  constructor(title, unit, data) {
    this.title = title;
    this.box = h("div", { class: "plot" });
    this.legend = h("ul", { class: "legend" });
    this.element = h("figure", { class: "panel chart" },
      h("figcaption", {}, h("h2", {}, title), h("span", { class: "unit" }, unit)), this.box, this.legend);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.box);
    this.data = data;
    alive.add(this);
  }

  set(data) {
    this.data = data;
    this.draw();
  }

  fit() {
    if (!this.plot) this.draw();
    else if (this.box.clientWidth && this.box.clientWidth !== this.plot.width) this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  draw() {
    if (!this.box.isConnected || !this.box.clientWidth) return;
    this.plot?.destroy();
    const columns = [this.data.steps], series = [{}], bands = [];
    for (const line of this.data.lines) {
      const stroke = colour(`--c${line.colour}`);
      if (line.low) {
        columns.push(line.high, line.low);
        series.push(HIDDEN, HIDDEN);
        bands.push({ series: [columns.length - 2, columns.length - 1], fill: `${stroke}33` });
      }
      columns.push(line.values);
      const few = line.values.filter((value) => value !== null && value !== undefined).length <= 60;
      series.push({ stroke, width: 1.75, dash: line.dashed ? [5, 4] : undefined, spanGaps: true, points: { show: few, size: 5, fill: stroke } });
    }
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.plot = new uPlot({
      width: this.box.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false }, y: { range: (_, low, high) => span(low, high) } },
      axes: [{ ...axis, size: 28, incrs: STEPS }, { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 7 } },
      series, bands,
      hooks: { setCursor: [(plot) => this.write(plot.cursor.idx)] },
    }, columns, this.box);
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${this.title} by training step`);
    this.write(null);
  }

  // Values at the cursor; without one those of the last step.
  write(place) {
    const at = (values) => (place === null || place === undefined ? values.findLast((value) => value !== null && value !== undefined) : values[place]);
    const step = place === null || place === undefined ? this.data.steps.at(-1) : this.data.steps[place];
    this.legend.replaceChildren(
      h("li", { class: "step" }, `step ${step ?? "–"}`),
      ...this.data.lines.map((line) => h("li", {}, h("i", { class: `key k${line.colour}${line.dashed ? " dashed" : ""}` }), `${line.label} `, h("b", {}, number(at(line.values) ?? null)))),
    );
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    alive.delete(this);
  }
}

function short(tick) {
  return Math.abs(tick) < 1e5 && (tick === 0 || Math.abs(tick) >= 1e-3) ? String(Number(tick.toPrecision(5))) : tick.toExponential(1);
}

function span(low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low === high) return [Math.min(0, low), high || 1];
  const room = 0.06 * (high - low);
  return [low >= 0 && low < 0.5 * high ? 0 : low - room, high + room];
}

document.addEventListener("theme", () => {
  for (const chart of alive) {
    if (chart.element.isConnected) chart.draw();
    else chart.close();
  }
});
