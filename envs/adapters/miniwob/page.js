// Runs in each page of MiniWoB++: begins a problem of a seed, shows the elements that a person sees, clicks and types.
window.rollFlash = (() => {
  const LEFT_OUT = "#query, #reward-display, #sync-task-cover, #click-canvas, script, style, noscript";
  const FIELDS = "input, textarea, select";
  const KINDS = { checkbox: "checkbox", radio: "radio", submit: "button", button: "button", image: "button" };
  const MAX_ELEMENTS = 40, MAX_TEXT = 80, HELD_OUT_SHARE = 8, MAX_DRAWS = 16;
  const EDGES = [0.5, 0.1, 0.9, 0.02, 0.98];
  let numbers = new Map();

  const squeezed = (text) => (text || "").replace(/\s+/g, " ").trim().slice(0, MAX_TEXT);
  function ownText(element) {
    const nodes = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    return squeezed(nodes.map((node) => node.data).join(" "));
  }

  const isLabel = (element) =>
    element.matches("label, span") &&
    Boolean(element.querySelector(FIELDS) || (element.nextElementSibling && element.nextElementSibling.matches(FIELDS)));

  function kindOf(element) {
    const tag = element.tagName.toLowerCase();
    if (tag === "input") return KINDS[element.type] || "field";
    if (tag === "textarea") return "field";
    if (tag === "button") return "button";
    const isLink = tag === "a" || element.tabIndex >= 0 || getComputedStyle(element).cursor === "pointer";
    if (isLink && squeezed(element.innerText)) return "link";
    if (isLabel(element)) return "";  // what it labels has its text
    return ownText(element) ? "text" : "";
  }

  function nameOf(element, kind) {
    if (kind === "text") return ownText(element);
    if (kind === "button" || kind === "link") return squeezed(element.innerText || element.value || element.title);
    const before = element.previousElementSibling;
    const label = element.closest("label") || (before && isLabel(before) ? before : null);
    return squeezed(element.placeholder || (label && label.innerText));
  }

  function entry(element, kind, text) {
    if (kind === "text") return { number: 0, kind, text, value: "", marks: [] };
    if (!numbers.has(element)) numbers.set(element, numbers.size + 1);
    const marks = [];
    if (element.checked || (kind === "option" && element.selected)) marks.push("chosen");
    if (element === document.activeElement) marks.push("focused");
    const value = kind === "field" ? element.value.slice(0, MAX_TEXT) : "";
    return { number: numbers.get(element), kind, text, value, marks };
  }

  function isSeen(element) {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && getComputedStyle(element).visibility !== "hidden";
  }

  function list(parent, found) {
    for (const element of parent.children) {
      if (element.matches(LEFT_OUT) || getComputedStyle(element).display === "none") continue;
      if (element.tagName === "SELECT") {
        for (const option of element.options) found.push(entry(option, "option", squeezed(option.text)));
        continue;
      }
      const kind = isSeen(element) ? kindOf(element) : "";
      if (kind) found.push(entry(element, kind, nameOf(element, kind)));
      if (!kind || kind === "text") list(element, found);
    }
    return found;
  }

  // A point of the element that nothing else covers, the middle if possible.
  function uncovered(element) {
    const points = [];
    for (const box of element.getClientRects())
      for (const y of EDGES)
        for (const x of EDGES) points.push([box.x + x * box.width, box.y + y * box.height]);
    return points.find(([x, y]) => element.contains(document.elementFromPoint(x, y)));
  }

  const shown = () => ({
    task: core.getUtterance(),
    elements: list(document.body, []).slice(0, MAX_ELEMENTS),
    done: WOB_DONE_GLOBAL,
    reward: WOB_RAW_REWARD_GLOBAL,
  });

  function begin(seed) {
    Math.seedrandom(seed);
    core.startEpisodeReal();
    numbers = new Map();
    return shown();
  }

  // FNV-1a of what the model is shown: its value decides whether a problem is held out.
  function hashOf(problem) {
    let hash = 0x811c9dc5;
    for (const character of JSON.stringify([problem.task, problem.elements]))
      hash = Math.imul(hash ^ character.charCodeAt(0), 0x01000193) >>> 0;
    return (hash ^ (hash >>> 15)) >>> 0;
  }
  const isHeldOut = (problem) => hashOf(problem) % HELD_OUT_SHARE === 0;

  return {
    shown,
    beginHeldOut: (number) => begin(`held out ${number}`),
    // Begin the first problem drawn from this seed that is not held out; the last one if there is none.
    beginTraining(seed) {
      for (let draw = 0; ; draw++) {
        const problem = begin(`${seed} ${draw}`);
        if (!isHeldOut(problem) || draw === MAX_DRAWS) return problem;
      }
    },
    // Numbers of seeds with held-out problems, each with the hash of its problem.
    findHeldOut(first, count) {
      const found = [];
      for (let number = first; number < first + count; number++) {
        const problem = begin(`held out ${number}`);
        if (isHeldOut(problem)) found.push([number, hashOf(problem)]);
      }
      return found;
    },
    // Where to click on an element. [] if that is done: an option has no place, nor has what others hide. null if it is
    // no longer there.
    placeOf(number) {
      const element = [...numbers.keys()].find((element) => numbers.get(element) === number);
      if (!element || !element.isConnected) return null;
      if (element.tagName === "OPTION") {
        const select = element.closest("select");
        select.focus();
        select.value = element.value;
        for (const kind of ["input", "change"]) select.dispatchEvent(new Event(kind, { bubbles: true }));
        return [];
      }
      if (!isSeen(element)) return null;
      element.scrollIntoView({ block: "nearest", inline: "nearest" });
      const point = uncovered(element);
      if (point) return point;
      element.focus();  // as the package does, which makes two buttons of which one hides the other
      element.click();
      return [];
    },
    selectAll() {
      if (document.activeElement && document.activeElement.select) document.activeElement.select();
    },
  };
})();
core.EPISODE_MAX_TIME = 2 ** 31 - 1;  // milliseconds: a model that is slow must not fail
core.countdownTimer = () => {};
if (window.jQuery) jQuery.fx.off = true;  // what a turn shows must not depend on the time that it took
