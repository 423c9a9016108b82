// Save the page as one file that needs no server: its texts, its pictures of charts, its style; no script.

import { h } from "./dom.js";

const STYLES = ["/pages/vendor/uplot/uPlot.min.css", "/pages/style.css"];
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'";

export async function exportPage(view, page) {
  const note = (await view?.forExport?.()) ?? "";
  const styles = await Promise.all(STYLES.map(async (path) => (await fetch(path)).text()));
  const copy = document.documentElement.cloneNode(true);
  const drawn = document.querySelectorAll("canvas");
  copy.querySelectorAll("canvas").forEach((canvas, i) => {
    const image = h("img", { src: drawn[i].toDataURL("image/png"), alt: canvas.getAttribute("aria-label") ?? "chart" });
    image.style.width = drawn[i].style.width || `${drawn[i].clientWidth}px`;
    canvas.replaceWith(image);
  });
  copy.querySelectorAll(".row.head button, button.plain").forEach((button) => button.replaceWith(h("span", {}, button.textContent)));
  copy.querySelectorAll("script, link, noscript, button, form, .skip, header.top nav, header.top img").forEach((element) => element.remove());
  copy.querySelectorAll("a").forEach((anchor) => anchor.replaceWith(h("span", { class: "was-link" }, ...anchor.childNodes)));
  copy.querySelectorAll("details").forEach((details) => details.setAttribute("open", ""));
  copy.querySelectorAll(".scroll").forEach((rows) => rows.classList.add("whole"));
  const said = `Saved ${new Date().toISOString().slice(0, 19)}Z${note ? `; ${note}` : ""}`;
  copy.querySelector("main").append(h("p", { class: "muted" }, said));
  copy.querySelector("head").prepend(h("meta", { "http-equiv": "Content-Security-Policy", content: POLICY }));
  copy.querySelector("head").append(h("style", {}, styles.join("\n")));
  const blob = new Blob(["<!doctype html>\n", copy.outerHTML], { type: "text/html" });
  const anchor = h("a", { href: URL.createObjectURL(blob), download: `${document.title.replace(/[^\w.-]+/g, "-")}.html` });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
  page.say(`${anchor.download} was saved${note ? ` (${note})` : ""}.`);
}
