// Elements and texts. Text reaches the page as text nodes only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a", {href, class, onclick}, ...children): an element; children are nodes, texts, or null.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
  else element.setAttribute(name, value === true ? "" : value);
}

// An address of this dashboard with these parameters; empty ones are left out.
export function address(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  return `?${query}`;
}

export function link(parameters, ...children) {
  return h("a", { href: address(parameters) }, ...children);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return plain(value); // an environment may put anything into its info
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("-", "−");
  return value.toFixed(size >= 100 ? 1 : digits).replace("-", "−");
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function ago(time) {
  return time ? `${seconds(Math.max(0, Date.now() / 1000 - time))} ago` : "–";
}

export function clock(time) {
  return time ? new Date(1000 * time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

export function table(head, rows, attributes = {}) {
  const cells = head.map((name) => h("th", { scope: "col", class: name.endsWith("#") ? "number" : "" }, name.replace(/#$/, "")));
  const body = rows.map((row) =>
    h("tr", {}, row.map((cell, column) => h("td", { class: head[column].endsWith("#") ? "number" : "" }, cell ?? "–"))),
  );
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": attributes.label ?? "table" },
    h("table", {}, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, body)));
}

export function card(name, value, detail = "") {
  return h("div", { class: "card" }, h("span", { class: "name" }, name), h("b", {}, value), h("span", { class: "detail" }, detail));
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...children);
}

export function folded(title, ...children) {
  return h("details", { class: "panel" }, h("summary", {}, h("h2", {}, title)), ...children);
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

// The look of a run's state (roll_flash/monitor/status.py).
export const STATES = { running: "good live", starting: "live", silent: "warn", failed: "bad", died: "bad" };

// The outcome of an episode, in a colour and a sign: colour alone does not tell.
export function outcome(episode) {
  if (episode.failed) return badge(`! ${episode.outcome || "failed"}`, "warn");
  const [sign, kind] = episode.success === true ? ["✓", "good"] : episode.success === false ? ["✗", "bad"] : ["•", ""];
  return badge(`${sign} ${episode.outcome || "ended"}`, kind);
}

// An environment's id or a task's without the folders of its file.
export function brief(id) {
  return id.replace(/^.*\/(?=[^/]*\.py:)/, "");
}

// The part of an episode's id that tells it from others of its group: r2 of g00000001-r2.
export function replica(id) {
  return id.slice(id.lastIndexOf("-") + 1);
}

export function sparkline(values, width = 96, height = 22) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "spark" })) {
    svg.setAttribute(name, value);
  }
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const points = values.map((value, i) => `${(2 + (i * (width - 4)) / Math.max(1, values.length - 1)).toFixed(1)},${(height - 3 - ((value - low) / span) * (height - 6)).toFixed(1)}`);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  if (values.length > 1) svg.append(line);
  return svg;
}

export function flat(tree, prefix = "", into = {}) {
  const isTree = tree !== null && typeof tree === "object" && Object.keys(tree).length > 0;
  if (!isTree) into[prefix] = tree;
  else for (const [name, value] of Object.entries(tree)) flat(value, prefix ? `${prefix}.${name}` : name, into);
  return into;
}

export function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
