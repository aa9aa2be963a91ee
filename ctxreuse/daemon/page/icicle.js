// The tree of contexts: width is tokens, colour where they lie, hatched what is pinned. Drawn on a canvas, so that ten
// thousand contexts take some milliseconds a frame.

import { colours, fit, named, short } from "./base.js";

const LOW = 21, TALL = 30, LEAST = 200, MOST = 342, GAP = 1, MOVE = 180;
// Fields of a row, see ctxreuse/daemon/page/panels.py.
export const [PARENT, START, TOKENS, BLOCKS, BYTES, TIER, LEVEL, FLAGS, HIDDEN, USED, WHO] = Array(11).keys();
export const PINNED = 1, STATE = 2, MORE = 4;

export class Icicle {
  constructor(canvas, onChoose) {
    this.canvas = canvas;
    this.onChoose = onChoose;
    this.rows = new Map();
    this.nodes = new Map();
    this.root = { id: "", depth: -1, left: 0, width: 0, children: [], parent: null, row: null };
    this.zoomed = this.root;
    this.chosen = "";
    this.hovered = null;
    this.frames = 0;
    this.view = [0, 1];
    this.line = LOW;
    this.wanted = false;
    canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    canvas.addEventListener("dblclick", (event) => this.zoom(this.at(event)));
    canvas.addEventListener("mousemove", (event) => this.hover(this.at(event)));
    canvas.addEventListener("mouseleave", () => this.hover(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // Take all rows: a Map from ids to arrays.
  update(rows) {
    this.rows = rows;
    const nodes = new Map();
    const root = { id: "", depth: -1, left: 0, width: 0, children: [], parent: null, row: null };
    for (const [id, row] of rows) nodes.set(id, { id, row, depth: 0, left: 0, width: 0, children: [], parent: root });
    for (const node of nodes.values()) {
      node.parent = nodes.get(node.row[PARENT]) || root;
      node.parent.children.push(node);
    }
    const order = [root];
    for (let i = 0; i < order.length; i++) for (const child of order[i].children) {
      child.depth = order[i].depth + 1;
      order.push(child);
    }
    for (let i = order.length - 1; i >= 0; i--) {
      const node = order[i];
      if (node.row) node.width += node.row[TOKENS] + node.row[HIDDEN];
      if (node.parent) node.parent.width += node.width;
    }
    for (const node of order) {
      // By size, but a few tokens more change no place.
      const size = (one) => Math.floor(Math.log2(one.width + 1));
      node.children.sort((a, b) => size(b) - size(a) || (a.id < b.id ? -1 : 1));
      let left = node.left;
      for (const child of node.children) {
        child.left = left;
        left += child.width;
      }
    }
    // As high as it is deep, within limits; then rows are as high as there is room.
    const deep = order.reduce((most, node) => Math.max(most, node.depth + 1), 1);
    const high = Math.min(Math.max(deep * LOW, LEAST), MOST);
    this.canvas.style.height = `${high}px`;
    this.line = Math.min(Math.max(Math.floor(high / deep), LOW), TALL);
    this.nodes = nodes;
    this.root = root;
    this.order = order;
    this.zoomed = nodes.get(this.zoomed.id) || root;
    this.view = this.goal();
    if (this.chosen && !nodes.has(this.chosen)) this.choose(null);
    else if (this.chosen) this.onChoose(nodes.get(this.chosen));
    this.draw();
  }

  goal() {
    return [this.zoomed.left, Math.max(this.zoomed.width, 1)];
  }

  choose(node) {
    this.chosen = node ? node.id : "";
    this.onChoose(node && node.row ? node : null);
    this.draw();
  }

  hover(node) {
    if (node === this.hovered) return;
    this.hovered = node;
    this.canvas.title = node && node.row ? `${label(node)} · ${short(node.row[TOKENS])} tokens` : "";
    this.draw();
  }

  zoom(node) {
    this.zoomed = node && node.row && node !== this.zoomed ? node : (this.zoomed.parent || this.root);
    const from = this.view, to = this.goal(), began = performance.now();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.view = to;
      return this.draw();
    }
    const step = (now) => {
      const t = Math.min((now - began) / MOVE, 1), ease = 1 - (1 - t) ** 3;
      this.view = [from[0] + (to[0] - from[0]) * ease, from[1] + (to[1] - from[1]) * ease];
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  key(event) {
    const node = this.nodes.get(this.chosen) || null;
    const beside = (step) => {
      const line = node.parent.children;
      return line[Math.min(Math.max(line.indexOf(node) + step, 0), line.length - 1)];
    };
    let next;
    if (event.key === "ArrowDown") next = node ? node.children[0] || node : this.zoomed.row ? this.zoomed : this.root.children[0];
    else if (event.key === "ArrowUp") next = node && node.parent.row ? node.parent : node;
    else if (event.key === "ArrowLeft") next = node ? beside(-1) : this.root.children[0];
    else if (event.key === "ArrowRight") next = node ? beside(1) : this.root.children[0];
    else if (event.key === "Enter" && node) this.zoom(node);
    else if (event.key === "Escape" && this.zoomed.row) this.zoom(null);
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
    if (next) {
      this.choose(next);
      if (!this.shows(next)) this.zoom(next.parent.row ? next.parent : null);
    }
  }

  shows(node) {
    const [left, width] = this.view;
    return node.left >= left - 1e-6 && node.left + node.width <= left + width + 1e-6 && node.depth - this.top() < this.lines();
  }

  // Ancestors of what is enlarged stay above it, as many as there is room for.
  top() {
    return Math.max(this.zoomed.depth - 3, 0);
  }

  lines() {
    return Math.floor(this.canvas.clientHeight / this.line);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, depth = Math.floor((event.clientY - box.top) / this.line) + this.top();
    const token = this.view[0] + x * this.view[1];
    let node = this.root;
    while (node && node.depth < depth) node = node.children.find((one) => token >= one.left && token < one.left + one.width);
    return node && node.row ? node : null;
  }

  draw() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      this.paint();
    });
  }

  paint() {
    this.frames++;
    const [pen, width, height] = fit(this.canvas);
    const paint = colours(), [from, span] = this.view, scale = width / span, top = this.top(), now = Date.now() / 1000, ROW = this.line;
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    const hatch = hatched(pen, paint.mark), ends = [];
    for (const node of this.order || []) {
      const line = node.depth - top, row = node.row;
      if (!row || line < 0 || (line + 1) * ROW > height) continue;
      const left = Math.max((node.left - from) * scale, 0), right = Math.min((node.left + node.width - from) * scale, width);
      if (right <= 0 || left >= width) continue;
      // What is thinner than a pixel is drawn once for all in that pixel.
      const wide = right - left, y = line * ROW;
      if (wide < 1) {
        const pixel = Math.floor(left);
        if (ends[line] === pixel) continue;
        ends[line] = pixel;
      }
      const w = Math.max(wide - (wide > 3 ? GAP : 0), .7);
      pen.globalAlpha = node === this.hovered ? .82 : 1;
      pen.fillStyle = paint[row[TIER]] || paint.disk;
      pen.fillRect(left, y, w, ROW - GAP);
      if (row[FLAGS] & PINNED && wide > 2) {
        pen.fillStyle = hatch;
        pen.fillRect(left, y, w, ROW - GAP);
      }
      if (row[USED] && now - row[USED] < 15) {
        pen.fillStyle = paint.mark;
        pen.fillRect(left, y + ROW - GAP - 2, w, 2);
      }
      pen.globalAlpha = 1;
      if (wide > 34) words(pen, label(node, wide - 10), left + 5, y + ROW / 2 - .5, wide - 10, row[TIER] === "disk" ? "#fff" : "#0b1117", row[FLAGS] & PINNED ? paint[row[TIER]] : "");
    }
    const chosen = this.nodes.get(this.chosen);
    if (chosen && chosen.depth >= top) {
      const left = Math.max((chosen.left - from) * scale, 0), right = Math.min((chosen.left + chosen.width - from) * scale, width);
      pen.strokeStyle = paint.mark;
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, (chosen.depth - top) * ROW + 1, Math.max(right - left - 3, 2), ROW - 3);
    }
  }
}

export function label(node, room = 1e9) {
  const count = short(node.row[TOKENS]), branches = node.children.length > 1 ? `, ${node.children.length} branches` : "";
  const shown = named(node.row[WHO]) || (room > 110 ? `${count} tokens` : count);
  return room > 190 ? shown + branches : shown;
}

function words(pen, text, x, y, room, colour, behind) {
  let shown = text;
  // Letters of this size are about six pixels wide.
  const most = Math.floor(room / 5.6);
  if (most < 3) return;
  if (shown.length > most) shown = shown.slice(0, most - 1) + "…";
  if (behind) {
    pen.fillStyle = behind;
    pen.fillRect(x - 2, y - 7, Math.min(pen.measureText(shown).width + 4, room + 4), 14);
  }
  pen.fillStyle = colour;
  pen.fillText(shown, x, y, room);
}

const patterns = new Map();
function hatched(pen, colour) {
  if (!patterns.has(colour)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 7;
    const one = tile.getContext("2d");
    one.strokeStyle = colour;
    one.globalAlpha = .5;
    one.lineWidth = 1.4;
    for (const shift of [-7, 0, 7]) {
      one.beginPath();
      one.moveTo(shift - 1, 8);
      one.lineTo(shift + 8, -1);
      one.stroke();
    }
    patterns.set(colour, pen.createPattern(tile, "repeat"));
  }
  return patterns.get(colour);
}
