// The replicas of a task side by side, and where they first differ.

import { get } from "./api.js";
import { brief, folded, h, link, number, outcome, replica } from "./dom.js";
import { fate } from "./episodes.js";

const SHOWN = 4000;

export async function show(main, query, page) {
  const run = query.get("run");
  const found = await get("group", { run, group: query.get("group") }, page.signal);
  const replicas = found.episodes.map((episode) => ({ episode, actions: episode.samples[0].turns.map((turn) => turn.action) }));
  const played = replicas.filter((each) => each.actions.length);
  const fork = firstDifference(played.map((each) => each.actions));
  const task = replicas[0].episode;
  const prompt = task.samples[0].messages.filter((message, place, all) => place < all.findIndex((each) => each.turn !== null && each.turn !== undefined));
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, brief(task.task)), h("p", { class: "muted path" }, `${found.group} · ${brief(task.env)} · ${fate(task)}`)),
    h("p", { class: "notice" }, played.length < 2 ? "One replica has turns; there is nothing to compare yet."
      : fork ? `The replicas first differ in turn ${fork.turn}, at character ${number(fork.character + 1)}.` : "All replicas wrote the same."),
    folded(`Prompt: ${(prompt.at(-1)?.text ?? "").slice(0, 100)}`, ...prompt.map((message) => h("article", { class: "message" }, h("header", {}, h("b", {}, message.role)), h("pre", { tabindex: "0" }, message.text)))),
    h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "replicas" }, replicas.map((each) => column(run, each, fork))));
  return {};
}

// The first turn and character at which not all agree; null if all are equal.
export function firstDifference(lists) {
  if (lists.length < 2) return null;
  const turns = Math.max(...lists.map((list) => list.length));
  for (let turn = 0; turn < turns; turn += 1) {
    const texts = lists.map((list) => list[turn]);
    if (texts.some((text) => text !== texts[0])) return { turn, character: common(texts.map((text) => text ?? "")) };
  }
  return null;
}

function common(texts) {
  const shortest = Math.min(...texts.map((text) => text.length));
  let place = 0;
  while (place < shortest && texts.every((text) => text[place] === texts[0][place])) place += 1;
  return place;
}

function column(run, { episode, actions }, fork) {
  const observations = episode.samples[0].messages;
  const blocks = actions.map((action, turn) => {
    const same = !fork || turn < fork.turn ? action.length : turn === fork.turn ? fork.character : 0;
    const text = h("pre", { tabindex: "0" }, h("span", { class: "same" }, action.slice(0, Math.min(same, SHOWN))),
      turn === fork?.turn ? h("mark", { class: "fork", title: "the replicas differ from here on" }, "▸") : "", action.slice(same, SHOWN));
    const place = observations.findIndex((message) => message.turn === turn);
    const answer = observations[place + 1];
    return h("article", { class: "message assistant" }, h("header", {}, `turn ${turn} · reward ${number(episode.samples[0].turns[turn].reward)}`), text,
      answer && place >= 0 && answer.role !== "assistant" ? h("pre", { class: "observation", tabindex: "0" }, answer.text.slice(0, SHOWN)) : "");
  });
  return h("section", { class: "replica" },
    h("header", {}, link({ run, view: "episode", id: episode.id }, `Replica ${replica(episode.id)}`), outcome(episode)),
    h("p", { class: "muted small" }, `reward ${number(episode.reward)} · advantage ${number(episode.advantage)} · ${number(episode.tokens)} tokens`),
    episode.message ? h("p", { class: "notice warn" }, episode.message.slice(0, SHOWN)) : "", blocks);
}
