// What all parts of the page use: texts of others made harmless, numbers as people read them, elements, canvases.

// Control characters, and those that turn the direction of a text, are shown as what they are: one odd character.
const ODD = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
export const plain = (text) => String(text ?? "").replace(ODD, "\ufffd");

// Names of sessions by id, so that a use is shown by its session's name.
export const names = new Map();
export const named = (who) => plain(names.get(who) ?? String(who ?? "").replace(/^([a-z]+[-_][0-9a-f]{8})[0-9a-f]{8,}$/, "$1…"));

export function short(count) {
  if (count < 1000) return String(Math.round(count));
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) {
      const value = count / size;
      return (value < 9.95 ? value.toFixed(1) : Math.round(value)) + unit;
    }
  }
}
export const bytes = (count) => (count < 1000 ? `${Math.round(count)} B` : short(count).replace(/(\D)$/, " $1B"));
export function duration(seconds) {
  if (seconds == null || !isFinite(seconds)) return "–";
  if (seconds <= 0) return "0 s";
  if (seconds < .0995) return `${(seconds * 1000).toFixed(seconds < .00995 ? 1 : 0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  if (seconds < 5970) return `${Math.round(seconds / 60)} min`;
  if (seconds < 171000) return `${(seconds / 3600).toFixed(seconds < 35820 ? 1 : 0)} h`;
  return `${Math.round(seconds / 86400)} d`;
}
export function ago(at) {
  const seconds = Math.max(Math.round(Date.now() / 1000 - at), 0);
  return seconds < 60 ? `${seconds} s` : duration(seconds);
}
export const percent = (share) => (share > 0 && share < .01 ? "<1 %" : share < 1 && share > .99 ? ">99 %" : `${Math.round(share * 100)} %`);
export const sum = (values) => Object.values(values).reduce((total, one) => total + one, 0);

export const $ = (id) => document.getElementById(id);

// An element; children are elements or texts, never markup.
export function h(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map((one) => (one instanceof Node ? one : plain(one))));
  return made;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Replace the content of an element by new ones, unless they say the same.
export function refill(element, children) {
  const key = children.map((one) => one.outerHTML).join();
  if (element.filled === key) return;
  element.filled = key;
  element.replaceChildren(...children);
}

export function figure(value, about, bad = false) {
  return h("p", bad ? "figure bad" : "figure", h("b", "", value), h("span", "", about));
}

export const key = (entries) => entries.map(([className, name, value]) => h("li", className, name, ...(value == null ? [] : [h("b", "", value)])));

// Fill a table's body: rows by id, each with cells `[text, class]` or `[text, class, [[class, share], …]]` with a bar.
export function table(section, items, cells, empty, open) {
  const body = section.querySelector("tbody"), none = empty && section.querySelector(":scope > .empty");
  const scroll = section.querySelector(".scroll") || section.querySelector("table");
  if (none) {
    none.hidden = items.length > 0;
    scroll.hidden = !items.length;
    if (!items.length) return refill(none, empty);
  }
  const known = body.known || (body.known = new Map()), seen = new Set();
  let before = null;
  for (const [id, row] of items) {
    seen.add(id);
    let line = known.get(id);
    if (!line) {
      known.set(id, (line = document.createElement("tr")));
      if (open) line.addEventListener("click", () => open(id));
      if (open) line.addEventListener("keydown", (event) => step(event, line, () => open(id)));
    }
    fill(line, cells(row, id));
    if (open) line.className = "link";
    const place = before ? before.nextSibling : body.firstChild;
    if (place !== line) body.insertBefore(line, place);
    before = line;
  }
  // One stop for Tab in each table; arrow keys go on from there.
  if (open && !body.querySelector('[tabindex="0"]')) for (const line of body.rows) line.tabIndex = line === body.rows[0] ? 0 : -1;
  if (open) for (const line of body.rows) if (!line.hasAttribute("tabindex")) line.tabIndex = -1;
  for (const [id, line] of known) if (!seen.has(id)) {
    line.remove();
    known.delete(id);
  }
}

function step(event, line, open) {
  if (event.key === "Enter") return open();
  const next = { ArrowDown: line.nextSibling, ArrowUp: line.previousSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  line.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function fill(line, cells) {
  cells.forEach(([text, className = "", parts], at) => {
    const cell = line.cells[at] || line.insertCell();
    const shown = plain(text), said = shown + className + (parts ? JSON.stringify(parts) : "");
    if (cell.said === said) return;
    cell.said = said;
    cell.className = className;
    cell.title = shown;
    cell.replaceChildren(...(parts ? [bar(parts), shown] : [shown]));
  });
}

// A bar of parts, each a class and a share of the whole.
export function bar(parts) {
  const whole = h("span", "bar");
  whole.style.display = "inline-flex";
  for (const [className, share] of parts) {
    const part = h("i", className);
    part.style.width = `${share * 100}%`;
    whole.append(part);
  }
  return whole;
}

let palette = null;
export function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = Object.fromEntries(["device", "host", "disk", "peer", "cloud", "compute", "mark", "text", "soft", "faint", "edge", "wash", "bad"].map((name) => [name, read(name)]));
  palette.lines = palette.edge;
  return palette;
}
export function repaint() {
  palette = null;
}

// A canvas at the resolution of its screen: its pen, width and height.
export function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [pen, width, height];
}
