// Where the time went: a canvas with lanes for the learner, the stages, the servers and the episodes; drag, wheel or keys zoom to one turn.

import { get } from "./api.js";
import { colour } from "./charts.js";
import { brief, clock, h, link, number, outcome, panel, seconds, share, table } from "./dom.js";

const LANE = 16, GAP = 4, LABEL = 118, RULER = 24, DENSE = 56;
const MOST_LANES = 40;
const ZOOM = 1.6;
const WAIT_MS = 120;
const KINDS = { accumulate: "--c1", update: "--c4", stage: "--c3", publication: "--c5" };
const NAMES = { accumulate: "learner: gradient", update: "learner: update", stage: "learner: copy" };
const KEYS = { "+": ["zoom", 1 / ZOOM], "=": ["zoom", 1 / ZOOM], "-": ["zoom", ZOOM], ArrowLeft: ["pan", -0.2], ArrowRight: ["pan", 0.2], "0": ["whole"], Home: ["whole"] };

export async function show(main, query, page) {
  const view = new Timeline(query, page);
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Timeline"), view.range),
    h("div", { class: "toolbar" },
      ...[["Zoom in", "+"], ["Zoom out", "-"], ["Earlier", "ArrowLeft"], ["Later", "ArrowRight"], ["All", "0"]].map(([title, key]) => h("button", { type: "button", onclick: () => view.press(key) }, title)),
      h("span", { class: "muted small" }, "Wheel or + and − zoom, drag or arrows move, 0 shows all. Choose an episode to open it.")),
    h("div", { class: "panel canvas" }, view.canvas, view.tip), view.legend, view.facts);
  await view.load();
  return { update: () => view.follow() };
}

class Timeline {
  constructor(query, page) {
    Object.assign(this, { query, page, data: null, boxes: [] });
    this.run = query.get("run");
    this.begin = query.has("begin") ? Number(query.get("begin")) : null;
    this.end = query.has("end") ? Number(query.get("end")) : null;
    this.range = h("p", { class: "muted", role: "status" });
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "timeline; the tables below have its figures" });
    this.tip = h("p", { class: "tip", hidden: true });
    this.legend = h("ul", { class: "legend" });
    this.facts = h("div", {});
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.press(event.key, event));
    document.addEventListener("theme", () => this.draw());
  }

  async load() {
    const data = await get("timeline", { run: this.run, begin: this.begin, end: this.end }, this.page.signal);
    if (!data.whole) {
      this.range.textContent = data.is_complete ? "Nothing has ended yet." : "The log is being read.";
      return;
    }
    this.data = data;
    this.draw();
    this.write();
  }

  async follow() {
    await this.load();
  }

  // From now on show this part of the time; what is known is drawn at once, details come with the answer.
  move(begin, end) {
    const [first, last] = this.data.whole;
    const room = 0.02 * (last - first) + 1;
    const width = Math.min(Math.max(end - begin, 1e-3), last - first + 2 * room);
    this.begin = Math.min(Math.max(begin, first - room), last + room - width);
    this.end = this.begin + width;
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.query.set("begin", this.begin.toFixed(3));
      this.query.set("end", this.end.toFixed(3));
      this.page.remember(this.query);
      this.load().catch(this.page.fail);
    }, WAIT_MS);
  }

  whole() {
    this.begin = this.end = null;
    this.query.delete("begin");
    this.query.delete("end");
    this.page.remember(this.query);
    this.load().catch(this.page.fail);
  }

  span() {
    return [this.begin ?? this.data.whole[0], this.end ?? this.data.whole[1]];
  }

  press(key, event) {
    if (!this.data || !(key in KEYS)) return;
    event?.preventDefault();
    const [begin, end] = this.span(), [what, by] = KEYS[key], middle = (begin + end) / 2;
    if (what === "whole") this.whole();
    else if (what === "pan") this.move(begin + by * (end - begin), end + by * (end - begin));
    else this.move(middle - (by * (end - begin)) / 2, middle + (by * (end - begin)) / 2);
  }

  wheel(event) {
    if (!this.data) return;
    event.preventDefault();
    const [begin, end] = this.span(), at = this.time(event.offsetX), by = event.deltaY > 0 ? ZOOM : 1 / ZOOM;
    this.move(at - (at - begin) * by, at + (end - at) * by);
  }

  drag(down) {
    if (!this.data) return;
    const [begin, end] = this.span(), scale = (end - begin) / this.width;
    let moved = 0;
    const move = (event) => {
      moved = event.clientX - down.clientX;
      if (Math.abs(moved) > 3) this.move(begin - moved * scale, end - moved * scale);
    };
    const up = () => {
      this.canvas.removeEventListener("pointermove", move);
      const box = Math.abs(moved) <= 3 && this.at(down.offsetX, down.offsetY);
      if (box?.id) this.page.go(`?${new URLSearchParams({ run: this.run, view: "episode", id: box.id })}`);
    };
    this.canvas.setPointerCapture(down.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", up, { once: true });
  }

  hover(event) {
    const box = this.at(event.offsetX, event.offsetY);
    this.canvas.classList.toggle("pointed", Boolean(box?.id));
    this.tip.hidden = !box;
    if (!box) return;
    this.tip.textContent = box.text;
    this.tip.style.left = `${Math.min(event.offsetX + 12, this.canvas.clientWidth - 240)}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  at(x, y) {
    return this.boxes.findLast((box) => x >= box.x - 1 && x <= box.x + box.w + 1 && y >= box.y && y <= box.y + box.h);
  }

  place(time) {
    const [begin, end] = this.span();
    return LABEL + ((time - begin) / (end - begin)) * this.width;
  }

  time(x) {
    const [begin, end] = this.span();
    return begin + ((x - LABEL) / this.width) * (end - begin);
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const lanes = this.lanes();
    const height = RULER + lanes.reduce((sum, lane) => sum + lane.height + GAP, 0) + GAP;
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.width = width - LABEL - 8;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const paint = this.paint = this.canvas.getContext("2d");
    paint.scale(ratio, ratio);
    paint.font = "12px system-ui, sans-serif";
    paint.textBaseline = "middle";
    this.colours = new Map();
    this.boxes = [];
    this.ruler(height);
    let top = RULER;
    for (const lane of lanes) {
      paint.fillStyle = this.ink("--muted");
      paint.fillText(clip(lane.name), 6, top + Math.min(lane.height, LANE) / 2);
      lane.draw(top);
      top += lane.height + GAP;
    }
  }

  ink(name) {
    if (!this.colours.has(name)) this.colours.set(name, colour(name));
    return this.colours.get(name);
  }

  ruler(height) {
    const [begin, end] = this.span(), paint = this.paint;
    const step = nice((end - begin) / Math.max(2, this.width / 110));
    const zero = this.data.whole[0];
    for (let t = Math.ceil((begin - zero) / step) * step; zero + t <= end; t += step) {
      const x = this.place(zero + t);
      paint.fillStyle = this.ink("--line");
      paint.fillRect(x, RULER - 6, 1, height);
      paint.fillStyle = this.ink("--muted");
      if (x < LABEL + this.width - 28) paint.fillText(mark(t, step), x + 3, 10);
    }
  }

  lanes() {
    const { work, busy, running, episodes } = this.data;
    const lanes = [{ name: "steps", height: LANE, draw: (top) => this.steps(top) }];
    for (const kind of Object.keys(busy)) {
      const name = NAMES[kind] ?? kind;
      const draw = work ? (top) => work.filter((span) => span.kind === kind).forEach((span) => this.box(span.begin_s, span.end_s, top, LANE, KINDS[kind] ?? "--c6", { text: `${name}, step ${span.step}: ${seconds(span.end_s - span.begin_s)}${span.tokens ? `, ${number(span.tokens)} tokens` : ""}${span.rows ? `, ${number(span.rows)} trajectories` : ""}` }))
        : (top) => this.density(busy[kind], top, LANE, KINDS[kind] ?? "--c6", 1);
      lanes.push({ name, height: LANE, draw });
    }
    lanes.push(...this.serverLanes(episodes ?? []));
    const most = Math.max(1, ...running);
    lanes.push({ name: `running (≤ ${number(Math.ceil(most))})`, height: DENSE, draw: (top) => this.density(running, top, DENSE, "--c2", most) });
    if (episodes) lanes.push(...this.episodeLanes(episodes));
    return lanes;
  }

  serverLanes(episodes) {
    const servers = new Map();
    for (const episode of episodes) {
      for (const [begin, answered, , server] of episode.turns ?? []) {
        if (server) servers.set(server, [...(servers.get(server) ?? []), { begin_s: begin, end_s: answered, episode }]);
      }
    }
    return [...servers].sort().map(([server, spans]) => ({ name: server, height: LANE, draw: (top) => spans.forEach((span) => this.box(span.begin_s, span.end_s, top, LANE, "--c3", { id: span.episode.id, text: `${server}: a turn of ${span.episode.id}, ${seconds(span.end_s - span.begin_s)}` }, 0.45)) }));
  }

  // Episodes of one worker share its lanes; each takes the first that is free.
  episodeLanes(episodes) {
    const lanes = [];
    for (const episode of [...episodes].sort((a, b) => a.worker.localeCompare(b.worker) || a.begin_s - b.begin_s)) {
      const free = lanes.find((lane) => lane.worker === episode.worker && lane.until <= episode.begin_s);
      if (free) {
        free.list.push(episode);
        free.until = episode.end_s;
      } else lanes.push({ worker: episode.worker, until: episode.end_s, list: [episode] });
    }
    const shown = lanes.slice(0, MOST_LANES).map((lane, i) => ({
      name: lane.worker && lane.worker !== lanes[i - 1]?.worker ? lane.worker : i === 0 ? "episodes" : "",
      height: LANE,
      draw: (top) => lane.list.forEach((episode) => this.episode(episode, top)),
    }));
    if (lanes.length > MOST_LANES) shown.push({ name: `+ ${lanes.length - MOST_LANES} lanes`, height: LANE, draw: () => {} });
    return shown;
  }

  steps(top) {
    for (const [step, begin, end] of this.data.steps) {
      const box = this.box(begin, end, top, LANE, step % 2 ? "--sunken" : "--line", { text: `step ${step}: ${seconds(end - begin)}` });
      if (box && box.w > 26) {
        this.paint.fillStyle = this.ink("--text");
        this.paint.fillText(String(step), box.x + 4, top + LANE / 2);
      }
    }
  }

  episode(episode, top) {
    const name = episode.failed ? "--warn" : episode.reward > 0 ? "--good" : "--muted";
    const text = `${episode.id}: ${brief(episode.env)}, ${episode.outcome}, reward ${number(episode.reward)}, ${seconds(episode.end_s - episode.begin_s)}`;
    this.box(episode.begin_s, episode.end_s, top, LANE, name, { id: episode.id, text }, episode.turns?.length ? 0.3 : 0.8);
    (episode.turns ?? []).forEach(([begin, answered, stepped, server], i) => {
      const which = `turn ${i} of ${episode.id}`;
      this.box(begin, answered, top + 2, LANE - 4, "--c3", { id: episode.id, text: `${which}: the model${server ? ` on ${server}` : ""}, ${seconds(answered - begin)}` });
      this.box(answered, stepped, top + 2, LANE - 4, "--c2", { id: episode.id, text: `${which}: the environment, ${seconds(stepped - answered)}` });
    });
  }

  box(begin, end, y, height, name, about, alpha = 1) {
    const left = Math.max(LABEL, this.place(begin)), right = Math.min(LABEL + this.width, this.place(end));
    if (right < LABEL || left > LABEL + this.width || right < left) return null;
    const box = { x: left, y, w: Math.max(1, right - left - 0.5), h: height, ...about };
    this.paint.globalAlpha = alpha;
    this.paint.fillStyle = this.ink(name);
    this.paint.fillRect(box.x, box.y, box.w, box.h);
    this.paint.globalAlpha = 1;
    this.boxes.push(box);
    return box;
  }

  density(values, top, height, name, most) {
    const { begin_s: begin, end_s: end } = this.data, width = (end - begin) / values.length;
    this.paint.fillStyle = this.ink(name);
    this.paint.globalAlpha = 0.75;
    values.forEach((value, i) => {
      const left = Math.max(LABEL, this.place(begin + i * width)), right = Math.min(LABEL + this.width, this.place(begin + (i + 1) * width));
      const size = Math.min(1, value / most) * height;
      if (right > left) this.paint.fillRect(left, top + height - size, right - left + 0.3, size);
    });
    this.paint.globalAlpha = 1;
  }

  // What the picture shows, in words and tables: shares of time, idle gaps, stragglers.
  write() {
    const { busy, running, work, episodes, begin_s: begin, end_s: end, count } = this.data;
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    this.range.textContent = `${seconds(end - begin)} from ${clock(begin)}; ${number(count)} episodes${episodes ? "" : ": zoom in to see each"}`;
    const kinds = Object.entries(busy).map(([kind, values]) => [NAMES[kind] ?? kind, share(mean(values))]);
    const without = running.filter((value) => value < 0.5).length / running.length;
    const parts = [table(["part", "busy#"], [...kinds, ["at least one episode", share(1 - without)]], { label: "busy" })];
    this.legend.replaceChildren(...[["k3", "the model, copy of weights"], ["k2", "environment, running episodes"], ["k1", "gradient"], ["k4", "update"], ["k5", "publication"], ["k6", "stages"]].map(([key, text]) => h("li", {}, h("i", { class: `key ${key}` }), text)));
    const gaps = work ? idleGaps(work, begin, end) : [];
    const slow = [...(episodes ?? [])].sort((a, b) => b.end_s - b.begin_s - (a.end_s - a.begin_s)).slice(0, 8);
    this.facts.replaceChildren(h("div", { class: "grid" },
      panel("Busy", ...parts),
      panel("Longest gaps of the learner", gaps.length ? table(["from the start", "length#"], gaps.map(([a, b]) => [h("button", { type: "button", class: "plain", onclick: () => this.move(a - (b - a), b + (b - a)) }, seconds(a - this.data.whole[0])), seconds(b - a)]), { label: "gaps" }) : h("p", { class: "muted" }, work ? "None." : "Zoom in to see single pieces of work.")),
      panel("Longest episodes", slow.length ? table(["episode", "outcome", "time#"], slow.map((one) => [link({ run: this.run, view: "episode", id: one.id }, one.id), outcome({ ...one, success: null }), seconds(one.end_s - one.begin_s)]), { label: "stragglers" }) : h("p", { class: "muted" }, "Zoom in to see single episodes."))));
  }
}

export function idleGaps(work, begin, end) {
  const spans = work.filter((span) => span.kind in KINDS && span.kind !== "publication").map((span) => [span.begin_s, span.end_s]).sort((a, b) => a[0] - b[0]);
  const gaps = [];
  let until = spans.length ? Math.max(begin, spans[0][0]) : end;
  for (const [from, to] of spans) {
    if (from > until) gaps.push([until, from]);
    until = Math.max(until, to);
  }
  return gaps.sort((a, b) => b[1] - b[0] - (a[1] - a[0])).slice(0, 8);
}

function nice(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
}

function mark(t, step) {
  if (step >= 60) return `${Math.floor(t / 3600) ? `${Math.floor(t / 3600)} h ` : ""}${Math.round((t % 3600) / 60)} min`;
  return step < 0.01 ? `${(1000 * t).toFixed(step < 0.001 ? 2 : 0)} ms` : `${t.toFixed(step < 0.1 ? 2 : step < 1 ? 1 : 0)} s`;
}

function clip(text) {
  return text.length > 18 ? `…${text.slice(-17)}` : text;
}
