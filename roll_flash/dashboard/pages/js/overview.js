// One run or evaluation: figures, what it does now, charts, evaluations, config, summary.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { badge, card, clock, flat, folded, h, link, number, panel, plain, seconds, share, table } from "./dom.js";

// Title, unit, lines as [metric, label, colour, dashed, metric of the lower and of the upper bound].
export const CHARTS = [
  ["Reward and success", "mean per episode", [["reward", "reward", 1], ["success", "success", 3], ["eval/success", "success, held out", 2, false, "eval/success_low", "eval/success_high"]]],
  ["Staleness", "versions", [["staleness_mean", "mean", 1], ["staleness_max", "largest", 1, true]]],
  ["Mismatch", "of sampler and learner", [["kl_k3", "KL (k3)", 4], ["weights/parity_max", "parity", 5, true]]],
  ["Speed", "tokens per second", [["tokens_per_s", "tokens/s", 1]]],
  ["Idle", "fraction of a step", [["idle/learner", "learner", 2], ["idle/servers", "servers", 6]]],
  ["Time of a step", "seconds", [["step_s", "step", 1], ["weights/total_s", "publication", 5]]],
  ["Length", "per episode", [["tokens_mean", "tokens", 1]]],
  ["Policy", "entropy, norm of the gradient", [["entropy", "entropy", 3], ["grad_norm", "gradient norm", 4]]],
  ["Groups without signal", "per step", [["groups_without_signal", "without signal", 2]]],
];

// Time between two diagnoses, which read many episodes.
const JUDGE_MS = 15000;

export async function show(main, query, page) {
  const run = query.get("run");
  const extra = query.getAll("metric");
  const about = await get("run", { run }, page.signal);
  const cards = h("div", { class: "cards" });
  const grid = h("div", { class: "grid" });
  const now = h("div", {}), health = h("div", {}), notices = h("div", {}), results = h("div", {});
  const charts = new Map();
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, about.name), h("p", { class: "muted path" }, about.folder)),
    notices, cards, health, now, grid);
  if (about.kind === "run") main.append(chooser(run, query, page));
  main.append(results, config(about));

  // Drawn anew only when they have changed: they have links and a part that can be unfolded.
  let known;
  function tell() {
    now.replaceChildren(...doing(about));
    const told = JSON.stringify([about.notices, about.evaluations, about.summary]);
    if (told === known) return;
    known = told;
    notices.replaceChildren(...about.notices.map((notice) => h("p", { class: "notice" }, notice)));
    results.replaceChildren(...scores(about.summary), ...evaluations(about), ...summary(about));
  }

  async function update() {
    const wanted = [...CHARTS, ...extra.map((name) => [name, "", [[name, name, 1]]])];
    const names = [...new Set(wanted.flatMap(([, , lines]) => lines.flatMap(([name, , , , low, high]) => [name, low, high])).filter(Boolean))];
    const [metrics, counts, newest] = await Promise.all([get("metrics", { run, name: [...names, "time"] }, page.signal), get("counts", { run }, page.signal), get("run", { run }, page.signal)]);
    Object.assign(about, newest);
    tell();
    cards.replaceChildren(...figures(about, metrics, counts));
    if (!metrics.steps.length && about.kind === "run") grid.replaceChildren(h("p", { class: "notice" }, "No step is done yet. The charts appear with the first."));
    for (const [title, unit, lines] of wanted) drawChart(title, unit, lines, metrics);
    const options = main.querySelector("#metrics");
    if (options) options.replaceChildren(...metrics.names.map((name) => h("option", { value: name })));
  }

  function drawChart(title, unit, lines, metrics) {
    const has = (name) => metrics.columns[name]?.some((value) => value !== null);
    const data = {
      steps: metrics.steps,
      lines: lines.filter(([name]) => has(name)).map(([name, label, colour, dashed, low, high]) => ({
        label, colour, dashed, values: metrics.columns[name],
        ...(low && has(low) ? { low: metrics.columns[low], high: metrics.columns[high] } : {}),
      })),
    };
    if (!data.lines.length) return;
    if (charts.has(title)) return charts.get(title).set(data);
    if (!charts.size) grid.replaceChildren();
    const chart = new Chart(title, unit, data);
    charts.set(title, chart);
    grid.append(chart.element);
  }

  // Comes after the rest, and anew while the run goes on.
  let judgedAt = -JUDGE_MS, timer;
  function judge() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (about.kind !== "run" || !health.isConnected) return;
      judgedAt = performance.now();
      get("findings", { run }, page.signal).then(({ findings }) => health.replaceChildren(judged(findings)), page.fail);
    }, judgedAt + JUDGE_MS - performance.now());
  }

  await update();
  judge();
  return { update: () => update().then(judge) };
}

// What the rules of `roll-flash diagnose` say.
function judged(findings) {
  const kinds = { error: "bad", warning: "warn" };
  const rows = findings.map((finding) => h("li", {}, h("p", {}, badge(finding.severity, kinds[finding.severity]), " ", h("b", {}, finding.name), `: ${finding.summary}`),
    h("p", { class: "muted" }, finding.evidence.join("; ")), h("p", {}, `Do: ${finding.remedy}`), h("p", { class: "muted" }, `See ${finding.docs}`)));
  return panel("Health", rows.length ? h("ul", { class: "findings" }, rows) : h("p", { class: "muted" }, "No rule of `roll-flash diagnose` finds a problem."));
}

function figures(about, metrics, counts) {
  const last = (name) => metrics.columns[name]?.findLast((value) => value !== null) ?? null;
  const steps = metrics.steps.at(-1);
  const total = about.kind === "run" ? about.config?.steps : null;
  const times = metrics.columns.time?.filter((time) => time !== null) ?? [];
  const left = total && times.length > 1 ? ((total - steps) * (times.at(-1) - times[0])) / Math.max(1, times.length - 1) : null;
  const failed = counts.episodes ? counts.failed / counts.episodes : null;
  const found = [];
  if (about.kind === "run") {
    found.push(
      card("step", `${steps ?? 0}${total ? ` / ${total}` : ""}`, (about.state === "running" || about.state === "silent") && left ? `about ${seconds(left)} left` : about.state),
      card("reward", number(last("reward")), "last step"),
      card("success", share(last("success")), last("eval/success") === null ? "last step" : `held out ${share(last("eval/success"))}`),
      card("staleness", number(last("staleness_mean"), 2), `largest ${number(last("staleness_max"))}`),
      card("speed", number(last("tokens_per_s")), "tokens/s"),
      card("idle", share(last("idle/learner")), `learner; servers ${share(last("idle/servers"))}`));
  }
  const reading = counts.is_complete ? "" : `; ${share(counts.read)} of the log is read`;
  found.push(card("episodes", number(counts.episodes), `${number(counts.failed)} failed (${share(failed)})${reading}`));
  if (counts.damaged) found.push(card("unreadable lines", number(counts.damaged), "damaged, or of a newer version"));
  return found;
}

// What a run says that it does now, and its newest lines.
function doing({ status, state }) {
  if (!status) return [];
  const isOver = ["done", "stopped", "failed", "died"].includes(state);
  const lines = isOver ? [] : [status.waits_for && `The step waits for ${status.waits_for}.`, ...status.now].filter(Boolean);
  const episodes = isOver ? [] : Object.entries(status.episodes).filter(([, count]) => count).map(([name, count]) => badge(`${name} ${number(count)}`));
  const news = status.news.slice(-8).reverse().map((line) => h("li", {}, h("span", { class: "muted" }, `${clock(line.time_s)} `), line.text));
  if (!lines.length && !news.length && !status.error) return [];
  return [panel("Now", status.error ? h("p", { class: "notice bad" }, status.error) : null, ...lines.map((line) => h("p", {}, line)),
    episodes.length ? h("p", { class: "badges" }, "Episodes: ", episodes) : null, news.length ? h("ul", { class: "links" }, news) : null)];
}

function chooser(run, query, page) {
  const input = h("input", { id: "metric", list: "metrics", placeholder: "name", autocomplete: "off" });
  const add = (event) => {
    event.preventDefault();
    if (!input.value) return;
    const next = new URLSearchParams(query);
    next.append("metric", input.value);
    page.go(`?${next}`);
  };
  return h("form", { class: "chooser", onsubmit: add }, h("label", { for: "metric" }, "Chart another metric"), input, h("datalist", { id: "metrics" }), h("button", {}, "Add"));
}

// Scores of an evaluation with their intervals.
function scores(summary) {
  if (!summary?.success && !summary?.pass_at_k) return [];
  const named = [["success", summary.success], ["reward", summary.reward], ...Object.entries(summary.pass_at_k ?? {}).map(([k, value]) => [`pass@${k}`, value])];
  const rows = named.filter(([, value]) => value).map(([name, value]) => [name, number(value.value), `${number(value.low)} to ${number(value.high)}`, number(value.count)]);
  return [panel("Scores", table(["score", "value#", "95 % interval", "tasks#"], rows, { label: "scores" }))];
}

function evaluations(about) {
  const rows = Object.entries(about.evaluations).map(([name, { success, reward }]) => [
    link({ run: name, view: "overview" }, name), share(success?.value), success ? `${share(success.low)} to ${share(success.high)}` : "", number(reward?.value), number(success?.count)]);
  return rows.length ? [panel("Evaluations", table(["evaluation", "success#", "95 % interval", "reward#", "tasks#"], rows, { label: "evaluations" }))] : [];
}

function config(about) {
  const rows = Object.entries(flat(about.config ?? {})).map(([key, value]) => [h("code", {}, key), h("code", {}, plain(value))]);
  return folded(about.kind === "run" ? "Config" : "Plan", table(["key", "value"], rows, { label: "config" }));
}

function summary(about) {
  if (!about.summary) return [];
  const rows = Object.entries(flat(about.summary)).map(([key, value]) => [h("code", {}, key), h("code", {}, plain(value))]);
  return [folded("Summary", table(["key", "value"], rows, { label: "summary" }))];
}
