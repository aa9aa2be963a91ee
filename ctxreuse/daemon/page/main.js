// Follows the daemon's feed, keeps what it says, and has the panels drawn when something has changed.

import { $, duration, plain, repaint, say } from "./base.js";
import { Icicle } from "./icicle.js";
import * as panels from "./panels.js";

const SILENCE = 25000, LONGEST = 5000;
const feed = { set: {}, rows: {} };
const dirty = new Set();
let token = sessionStorage.getItem("ctxreuse-key") || "", drawing = false, since = 0;

const icicle = new Icicle($("icicle"), (node) => panels.chosen(node, feed, choose));
panels.chosen(null, feed, choose);

function choose(id) {
  const node = icicle.nodes.get(id);
  if (!node) return;
  icicle.choose(node);
  if (!icicle.shows(node)) icicle.zoom(node.parent.row ? node.parent : null);
  $("tree").scrollIntoView({ block: "nearest" });
}

// What is drawn again when a panel of the feed changes.
const DRAWS = {
  daemon: ["head", "links", "backends", "decisions", "sessions"],
  tokens: ["reuse", "running"],
  running: ["running"],
  store: ["store", "removals"],
  contexts: ["tree"],
  sessions: ["sessions", "tree"],
  chats: ["sessions"],
  requests: ["requests", "sessions"],
  removals: ["removals"],
  links: ["links"],
  peers: ["links"],
  backends: ["backends"],
  decisions: ["decisions"],
};
const DRAW = {
  head,
  reuse: panels.reuse,
  rate: panels.rate,
  running: panels.running,
  store: panels.store,
  tree: (all) => {
    icicle.update(all.rows.contexts || new Map());
    panels.tree(all);
  },
  sessions: (all) => panels.sessions(all, choose),
  requests: (all) => panels.requests(all, choose),
  removals: panels.removals,
  links: panels.links,
  backends: panels.backends,
  decisions: panels.decisions,
};
// With the time that has passed, these change by themselves.
const AGING = ["head", "rate", "running", "requests", "sessions", "removals", "links"];

function draw(names) {
  for (const name of names) dirty.add(name);
  if (drawing || !feed.set.daemon) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const now = [...dirty];
    dirty.clear();
    // Names of sessions first: others show them.
    now.sort((a, b) => (b === "sessions") - (a === "sessions"));
    for (const name of now) {
      try {
        DRAW[name](feed);
      } catch (error) {
        console.error(name, error); // the other panels are drawn nevertheless
      }
    }
  });
}

function take(message) {
  if (message.full) {
    feed.set = {};
    feed.rows = {};
    panels.past.length = 0;
  }
  Object.assign(feed.set, message.set);
  const names = new Set(Object.keys(message.set).flatMap((name) => DRAWS[name] || []));
  for (const [name, { all, put, drop }] of Object.entries(message.rows)) {
    if (all || !feed.rows[name]) feed.rows[name] = new Map();
    const rows = feed.rows[name];
    for (const id of drop) rows.delete(id);
    for (const id of Object.keys(put)) rows.set(id, put[id]);
    for (const draws of DRAWS[name] || []) names.add(draws);
  }
  if (message.full) {
    $("panels").hidden = $("state").hidden = false;
    $("key").hidden = true;
    for (const name of Object.keys(DRAW)) names.add(name);
  }
  draw(names);
}

function head({ set: { daemon } }) {
  say($("kind"), daemon.kind);
  document.title = `ctxreuse ${daemon.kind}`;
  const models = daemon.models.map(([name, state]) => (state === "up" ? name : `${name} (${state})`)).join(", ");
  say($("about"), plain(`${models || "no model"} · version ${daemon.version} · process ${daemon.pid} · up ${duration(Date.now() / 1000 - daemon.since)}`));
  $("about").title = $("about").textContent;
  if (daemon.failing) status("down", daemon.failing);
  else if (since) status("up", "up to date");
}

function status(name, text) {
  $("state").className = name;
  say($("state").lastElementChild, plain(text));
  $("panels").classList.toggle("stale", name === "down" && !since);
}

async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 2, LONGEST)) {
    const stop = new AbortController();
    let watch = setTimeout(() => stop.abort(), SILENCE);
    try {
      const headers = token ? { authorization: `Bearer ${token}` } : {};
      const answer = await fetch("/api/events", { headers, cache: "no-store", signal: stop.signal });
      if (answer.status === 401 || answer.status === 403) {
        clearTimeout(watch);
        await ask(token ? "This key does not open the page." : "");
        wait = 250;
        continue;
      }
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = ""; ;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("the daemon ended the connection");
        clearTimeout(watch);
        watch = setTimeout(() => stop.abort(), SILENCE);
        const lines = (text + value).split("\n");
        text = lines.pop();
        for (const line of lines) if (line.startsWith("data: ")) {
          since = Date.now();
          wait = 250;
          take(JSON.parse(line.slice(6)));
        }
      }
    } catch (error) {
      since = 0;
      const text = error instanceof TypeError || error.name === "AbortError" ? "no daemon answers" : error.message;
      status("down", `${text}; trying again`);
    }
    clearTimeout(watch);
    await new Promise((go) => setTimeout(go, wait));
  }
}

function ask(why) {
  since = 0;
  status("down", "a key is needed");
  $("panels").hidden = true;
  $("key").hidden = false;
  say($("key-why"), why);
  $("key-text").value = "";
  $("key-text").focus();
  return new Promise((go) => {
    $("key").onsubmit = (event) => {
      event.preventDefault();
      token = $("key-text").value.trim();
      sessionStorage.setItem("ctxreuse-key", token);
      status("", "connecting …");
      go();
    };
  });
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  repaint();
  draw(Object.keys(DRAW));
}

const light = matchMedia("(prefers-color-scheme: light)");
const saved = () => localStorage.getItem("ctxreuse-theme");
const wanted = () => saved() || (light.matches ? "light" : "dark");
light.addEventListener("change", () => theme(wanted()));
function turn() {
  localStorage.setItem("ctxreuse-theme", wanted() === "light" ? "dark" : "light");
  theme(wanted());
}
$("theme").addEventListener("click", turn);
$("help-button").addEventListener("click", () => $("help").showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target instanceof HTMLInputElement || $("help").open) return;
  if (event.key === "t") turn();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "c" && !$("icicle").hidden) $("icicle").focus();
});
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => draw(["rate", "running", "decisions"]), 80);
});
setInterval(() => {
  if (!since) return;
  panels.sample(feed);
  draw(AGING);
}, 1000);

theme(wanted());
follow();
