"use strict";
// Text of models and environments reaches the page as textContent only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const reader = document.getElementById("reader");

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function part(piece) {
    if (piece.kind === "text") return make("div", "text", piece.text);
    const folded = make("details");
    const summary = make("summary");
    summary.append(make("b", "", piece.title), " " + piece.preview);
    folded.append(summary);
    // Filled on opening, so that a long conversation shows quickly.
    folded.addEventListener("toggle", () => {
      if (folded.open && folded.children.length === 1) folded.append(make("pre", "", piece.text));
    });
    return folded;
  }

  function transcript(episode) {
    const box = make("article", "transcript");
    box.append(make("h3", "", episode.title), make("p", "quiet", episode.ending));
    for (const message of episode.messages) {
      const shown = make("section", "message " + (message.role === "assistant" ? "assistant" : ""));
      shown.append(make("header", "", message.role + (message.about ? " \u00b7 " + message.about : "")));
      for (const piece of message.parts) shown.append(part(piece));
      box.append(shown);
    }
    return box;
  }

  function show(button) {
    for (const other of document.querySelectorAll("button.attempt[aria-pressed=true]")) {
      other.setAttribute("aria-pressed", "false");
    }
    button.setAttribute("aria-pressed", "true");
    const numbers = button.dataset.episodes.split(" ").map(Number);
    reader.className = numbers.length > 1 ? "reader pair" : "reader";
    reader.replaceChildren(...numbers.map((number) => transcript(data.episodes[number])));
    document.getElementById("transcripts").scrollIntoView({ block: "start" });
  }

  for (const button of document.querySelectorAll("button.attempt")) {
    if (!button.disabled) button.addEventListener("click", () => show(button));
  }

  function value(row, column) {
    const cell = row.cells[column];
    const key = cell.dataset.value ?? cell.textContent;
    const number = Number(key);
    return key !== "" && !Number.isNaN(number) ? number : key;
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th button").forEach((button) => {
      button.addEventListener("click", () => {
        const header = button.parentElement;
        const falls = header.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        header.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const body = table.tBodies[0];
        const column = header.cellIndex;
        const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
        body.append(...(falls ? rows.reverse() : rows));
      });
    });
  }
})();
