// One episode: its conversation by turn, each sampled token in a colour: log-probability, age, advantage, ...

import { get } from "./api.js";
import { badge, brief, card, clock, folded, h, link, number, outcome, panel, plain, replica, seconds, table } from "./dom.js";
import { fate } from "./episodes.js";

const COLOURS = [["none", "none"], ["logprob", "log-probability"], ["age", "age"], ["version", "version"], ["advantage", "advantage"], ["difference", "learner minus sampler"]];

export async function show(main, query, page) {
  const run = query.get("run"), id = query.get("id");
  const episode = await get("episode", { run, id }, page.signal);
  const conversation = h("div", { class: "conversation" });
  const token = h("p", { class: "muted token-detail", role: "status" });
  const parts = episode.samples.flatMap((sample) => [...sample.turns.map((turn) => turn.tokens), ...sample.tokens]).filter(Boolean);
  const missing = { advantage: episode.advantage === null, difference: !parts.some((tokens) => tokens.differences) };
  const draw = (by) => conversation.replaceChildren(...episode.samples.map((sample, i) => drawSample(run, episode, sample, i, by, token)));
  const by = query.get("colour") ?? (parts.some((tokens) => tokens.texts) ? "logprob" : "none");
  const choose = (name) => {
    query.set("colour", name);
    page.remember(query);
    draw(name);
    legend.replaceChildren(...drawLegend(name));
  };
  const legend = h("span", { class: "scale" }, drawLegend(by));
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, brief(episode.task)), outcome(episode), h("p", { class: "muted path" }, episode.id)),
    episode.message ? h("p", { class: "notice warn" }, `turn ${episode.failed_turn}, attempt ${(episode.attempt ?? 0) + 1}: ${episode.message}`) : "",
    h("div", { class: "cards" }, cards(run, episode)),
    replicas(run, episode),
    h("section", { class: "panel" },
      h("div", { class: "toolbar" }, h("h2", {}, "Conversation"),
        h("fieldset", { class: "choice" }, h("legend", {}, "Colour of tokens"), COLOURS.filter(([name]) => !missing[name]).map(([name, title]) =>
          h("label", {}, h("input", { type: "radio", name: "colour", value: name, checked: name === by, onchange: () => choose(name) }), title))),
        legend),
      token, conversation),
    ...rewards(episode), ...tools(episode), ...commands(episode),
    folded("Info of the environment", pre(episode.info)),
    folded("Task", table(["key", "value"], [["environment", episode.env], ["seed", number(episode.seed)], ["arguments", h("code", {}, plain(episode.env_kwargs ?? {}))]], { label: "task" })));
  draw(by);
  return {};
}

function cards(run, episode) {
  const time = episode.started_s === null ? null : episode.finished_s - episode.started_s;
  const advantage = episode.advantage === null ? (episode.trained ? "one per turn, not recorded" : "not trained") : "as the learner computes it";
  return [
    card("reward", number(episode.reward), episode.success === null ? "" : episode.success ? "a success" : "no success"),
    card("advantage", number(episode.advantage), advantage),
    card("trained", fate(episode), `ended during step ${episode.step + 1}`),
    card("tokens", number(episode.tokens), `of the policy; ${number(episode.samples[0].length)} in all`),
    card("time", seconds(time), clock(episode.started_s)),
  ];
}

function replicas(run, episode) {
  if (episode.replicas.length < 2) return "";
  return h("p", { class: "replicas" }, link({ run, view: "group", group: episode.group }, "All replicas side by side"), " or one: ",
    episode.replicas.map((id) => {
      const one = link({ run, view: "episode", id }, replica(id));
      if (id === episode.id) one.setAttribute("aria-current", "page");
      return one;
    }));
}

function rewards(episode) {
  const named = Object.entries(episode.rewards && typeof episode.rewards === "object" ? episode.rewards : {});
  const turns = episode.samples[0].turns;
  const judged = (episode.trained_reward ?? episode.reward) === episode.reward ? [] : [["of the environment", number(episode.reward)], ["as trained, after stages", number(episode.trained_reward)]];
  const rows = [...named.map(([name, value]) => [name, plain(value)]), ...judged, ...(turns.length > 1 ? turns.map((turn, i) => [`turn ${i}`, number(turn.reward)]) : [])];
  return rows.length ? [panel("Rewards", h("div", { class: "narrow" }, table(["reward", "value#"], rows, { label: "rewards" })))] : [];
}

function tools(episode) {
  const used = Object.entries(episode.tools && typeof episode.tools === "object" ? episode.tools : {});
  if (!used.length) return [];
  return [panel("Tools", table(["tool", "calls#", "errors#", "time-outs#", "time#"], used.map(([name, use]) => [name, number(use?.calls), number(use?.errors), number(use?.timeouts), seconds(use?.seconds)]), { label: "tools" }))];
}

function commands(episode) {
  if (!Array.isArray(episode.commands) || !episode.commands.length) return [];
  const items = episode.commands.map((command) => h("details", { class: "message" },
    h("summary", {}, h("code", {}, command.command), badge(command.exit_code === 0 ? "exit 0" : `exit ${command.exit_code}`, command.exit_code === 0 ? "" : "warn"), h("span", { class: "muted" }, seconds(command.seconds))), pre({ text: command.output ?? "", characters: (command.output ?? "").length })));
  return [panel("Commands in the sandbox", ...items)];
}

function drawSample(run, episode, sample, number_, by, token) {
  const why = sample.role ? `played as ${sample.role}` : "the agent rewrote its history";
  const title = number_ || sample.role ? h("h3", {}, `Sample ${number_ + 1}: ${why}`) : "";
  const messages = sample.messages.map((message, place) => drawMessage(run, episode, sample, number_, message, place, by, token));
  if (sample.last_observation) messages.push(h("article", { class: "message" }, h("header", {}, "environment, after the last turn"), pre(sample.last_observation)));
  const loose = sample.tokens.map((tokens) => h("article", { class: "message assistant" }, h("header", {}, "assistant"), drawTokens(tokens, episode, by, token)));
  return h("section", {}, title, messages, loose);
}

function drawMessage(run, episode, sample, number_, message, place, by, token) {
  const turn = message.turn === null || message.turn === undefined ? null : sample.turns[message.turn];
  const about = turn ? ` · turn ${message.turn} · ${[seconds(turn.generate_s), turn.finish_reason, turn.server, `environment ${seconds(turn.step_s)}`].filter(Boolean).join(" · ")}` : "";
  const body = turn?.tokens && by !== "none" ? drawTokens(turn.tokens, episode, by, token) : pre(message, () => get("message", { run, id: episode.id, sample: number_, message: place }));
  return h("article", { class: `message ${turn ? "assistant" : ""}` }, h("header", {}, h("b", {}, message.role), about), body);
}

export function pre(cut, whole) {
  const text = h("pre", { tabindex: "0" }, cut.text);
  if (cut.characters <= cut.text.length) return text;
  const more = h("button", { type: "button" }, `Show all ${number(cut.characters)} characters`);
  more.addEventListener("click", async () => {
    text.textContent = await whole();
    more.remove();
  });
  return h("div", {}, text, whole ? more : h("p", { class: "muted" }, `${number(cut.characters)} characters in all`));
}

function drawTokens(tokens, episode, by, detail) {
  const box = h("pre", { class: `tokens by-${by}`, tabindex: "0" });
  tokens.ids.forEach((id, i) => {
    const age = episode.trained ? episode.trained - 1 - tokens.versions[i] : episode.step - tokens.versions[i];
    const difference = tokens.differences?.[i] ?? null;
    const level = levelOf(by, { logprob: tokens.logprobs[i], age, version: tokens.versions[i], advantage: episode.advantage, difference });
    const one = document.createElement("span");
    one.className = level;
    one.textContent = tokens.texts ? tokens.texts[i] : `${id} `;
    one.dataset.about = `token ${id} · log-probability ${number(tokens.logprobs[i])} (p ${number(Math.exp(tokens.logprobs[i]))}) · version ${tokens.versions[i]} · age ${age}${difference === null ? "" : ` · learner minus sampler ${number(difference)}`}`;
    box.append(one);
  });
  box.addEventListener("mouseover", (event) => {
    if (event.target.dataset.about) detail.textContent = event.target.dataset.about;
  });
  let here = null;
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: here ? here.nextElementSibling : box.firstElementChild, ArrowLeft: here?.previousElementSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    here?.classList.remove("here");
    here = next;
    here.classList.add("here");
    here.scrollIntoView({ block: "nearest" });
    detail.textContent = here.dataset.about;
  });
  const notes = [];
  if (!tokens.texts) notes.push("Shown as numbers: the run has no tokenizer yet, it comes with the first checkpoint.");
  if (tokens.left_out) notes.push(`${number(tokens.left_out)} further tokens are not shown.`);
  return notes.length ? h("div", {}, box, h("p", { class: "muted" }, notes.join(" "))) : box;
}

function levelOf(by, { logprob, age, version, advantage, difference }) {
  if (by === "logprob") return logprob === null ? "bad5" : `bad${Math.min(5, Math.floor(Math.sqrt(Math.max(0, -logprob)) * 2))}`;
  if (by === "age") return `age${Math.min(5, Math.max(0, age))}`;
  if (by === "version") return `v${version % 6}`;
  if (by === "difference") return `${difference > 0 ? "up" : "bad"}${Math.min(5, Math.round(5 * Math.abs(difference ?? 0)))}`;
  const size = Math.min(5, Math.ceil(Math.abs(advantage) * 2));
  return advantage > 0 ? `up${size}` : `bad${size}`;
}

function drawLegend(by) {
  const steps = {
    logprob: [["bad0", "likely"], ["bad2", ""], ["bad3", ""], ["bad5", "unlikely"]],
    age: [["age0", "age 0"], ["age1", "1"], ["age2", "2"], ["age3", "3"]],
    version: [["v0", "one colour per"], ["v1", "weight"], ["v2", "version"]],
    advantage: [["bad3", "below its group"], ["up3", "above"]],
    difference: [["bad3", "less likely for the learner"], ["up3", "more likely"]],
  }[by] ?? [];
  return steps.map(([kind, text]) => h("span", { class: `swatch ${kind}` }, text || " "));
}
