// Failures by cause, environment and message.

import { get } from "./api.js";
import { brief, h, link, number, panel, share, table } from "./dom.js";

export async function show(main, query, page) {
  const run = query.get("run");
  const body = h("div", {});
  main.replaceChildren(h("div", { class: "heading" }, h("h1", {}, "Failures"), h("p", { class: "muted" }, "Episodes without a trajectory: counted, retried, never a reward of 0.")), body);

  async function update() {
    const counts = await get("counts", { run }, page.signal);
    if (!counts.failed) {
      body.replaceChildren(h("p", { class: "notice" }, `No failure in ${number(counts.episodes)} episodes${counts.is_complete ? "" : ", so far as the log is read"}.`));
      return;
    }
    const causes = Object.entries(counts.causes).map(([cause, count]) => [link({ run, view: "episodes", outcome: cause }, cause), number(count), share(count / counts.episodes), bar(count / counts.failed)]);
    const envs = Object.entries(counts.failures_by_env).map(([env, count]) => [link({ run, view: "episodes", env, outcome: "failed" }, brief(env)), number(count), share(count / counts.envs[env])]);
    const messages = counts.messages.map(([cause, message, count, id]) => [cause, link({ run, view: "episode", id }, message || "(no message)"), number(count)]);
    body.replaceChildren(
      panel("By cause", table(["cause", "episodes#", "of all#", "share of failures"], causes, { label: "by cause" })),
      panel("By environment", table(["environment", "failures#", "of its episodes#"], envs, { label: "by environment" })),
      panel("By message", table(["cause", "message (the newest episode)", "episodes#"], messages, { label: "by message" })));
  }

  await update();
  return { update };
}

function bar(fraction) {
  const inner = h("i", { class: "bar" });
  inner.style.width = `${Math.max(1, 100 * fraction)}%`;
  return h("span", { class: "bars" }, inner);
}
