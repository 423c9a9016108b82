// All runs and evaluations, newest first; several can be compared.

import { get } from "./api.js";
import { address, ago, badge, h, link, number, sparkline, STATES } from "./dom.js";

export async function show(main, query, page) {
  const chosen = new Set();
  const list = h("div", { class: "list" });
  const button = h("button", { type: "button", class: "primary", disabled: true, onclick: () => page.go(address({ view: "compare", run: [...chosen] })) }, "Compare");
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Runs"), h("p", { class: "muted" }, "Choose two or more to compare them."), button), list);

  const count = () => {
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size < 2 ? "Compare" : `Compare ${chosen.size}`;
  };

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.name) });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.name);
      else chosen.delete(run.name);
      count();
    });
    const step = run.step === null || run.step === undefined ? "" : `${run.step}${run.steps ? ` / ${run.steps}` : ""}`;
    return h("tr", {},
      h("td", { class: "tick" }, run.kind === "run" ? box : ""),
      h("td", {}, link({ run: run.name, view: "overview" }, run.name), h("div", { class: "muted small" }, [run.kind, run.model].filter(Boolean).join(" · "))),
      h("td", {}, badge(run.state, STATES[run.state])),
      h("td", { class: "number" }, step),
      h("td", { class: "number" }, number(run.reward)),
      h("td", { class: "number wide-only" }, number(run.success)),
      h("td", { class: "wide-only" }, run.recent.length > 1 ? sparkline(run.recent) : ""),
      h("td", { class: "muted wide-only" }, ago(run.written_s)));
  }

  async function update() {
    const found = await get("runs", {}, page.signal);
    const runs = found.runs.sort((a, b) => (b.written_s ?? 0) - (a.written_s ?? 0));
    const head = ["", "name", "state", "step", "reward", "success", "recent reward", "written"];
    const table = h("table", {},
      h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: `${[3, 4, 5].includes(i) ? "number" : ""} ${i > 4 ? "wide-only" : ""}` }, name || h("span", { class: "hidden" }, "compare"))))),
      h("tbody", {}, runs.map(row)));
    list.replaceChildren(
      ...found.errors.map((error) => h("p", { class: "notice bad" }, error)),
      runs.length ? h("div", { class: "panel wide" }, table)
        : h("p", { class: "notice" }, `There is no run in ${found.roots} yet. Start one with \`roll-flash train CONFIG\`; it appears here by itself.`));
  }

  await update();
  return { update };
}
