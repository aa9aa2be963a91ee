// Draws each panel from the newest values and rows of the feed.

import { $, ago, bar, bytes, colours, duration, figure, fit, h, key, named, names, percent, plain, refill, say, short, sum, table } from "./base.js";
import { BLOCKS, BYTES, FLAGS, HIDDEN, LEVEL, MORE, PINNED, START, STATE, TIER, TOKENS, USED, WHO, label } from "./icicle.js";

const SPAN = 300, MINUTE = 60;
const TIERS = { device: "device", host: "host memory", disk: "disk", edge: "another device", cloud: "cloud", compute: "computed" };
const WAITS = {
  unknown: "something", tool: "a tool", end_of_turn: "the user", length: "more tokens", closed: "nothing: closed",
  superseded: "nothing: replaced", running: "an answer",
};
const WAYS = { load: "loaded", recompute: "computed", layers: "fetched", tail: "partly fetched" };
const WHY = {
  new: "never seen", evicted: "evicted", dropped: "dropped", refused: "not stored", lost: "lost", running: "being computed",
  space: "another model", absent: "not stored", slow: "computing was faster", level: "too lossy", state: "no state there",
  disk: "disk full or failing", gate: "quality gate", link: "link failed", card: "no profile",
};

export const past = [];

// Note the totals of this moment, for rates.
export function sample(feed) {
  const tokens = feed.set.tokens;
  if (!tokens) return;
  const now = Date.now() / 1000, links = [...(feed.rows.links || new Map())].map(([name, row]) => [name, [row[4], row[5]]]);
  const answers = new Map(((feed.set.running || {}).answers || []).map((one) => [one[0] || one[1], one[4]]));
  past.push({ at: now, reused: reusedOf(tokens), computed: tokens.sources.compute || 0, generated: tokens.generated, gaps: tokens.gaps, links: new Map(links), answers });
  while (past.length && past[0].at < now - SPAN - 2) past.shift();
}
const reusedOf = (tokens) => sum(tokens.sources) - (tokens.sources.compute || 0);
const before = (seconds) => past.find((one) => one.at >= Date.now() / 1000 - seconds) || past[past.length - 1];

export function reuse({ set: { tokens, daemon } }) {
  const tiers = daemon.kind === "cloud" ? { cloud: "reused by backends", compute: "computed" } : TIERS;
  const total = sum(tokens.sources), reused = reusedOf(tokens), computed = total - reused;
  say($("share"), total ? percent(reused / total) : "–");
  const net = tokens.saved - tokens.lost;
  $("saved").parentElement.hidden = tokens.saved == null;
  say($("saved"), tokens.saved == null ? "–" : net < 0 ? `−${duration(-net)}` : duration(net));
  $("saved").title = tokens.saved == null ? "" : `${duration(tokens.saved)} saved where reuse was faster, ${duration(tokens.lost)} lost where it was not; ${duration(tokens.computing)} were computed`;
  say($("reused"), short(reused));
  say($("computed"), short(computed));
  say($("generated"), short(tokens.generated));
  const used = Object.entries(tokens.sources).filter(([, count]) => count);
  const stack = $("sources");
  if (stack.children.length !== used.length || used.some(([name], at) => stack.children[at].className !== name)) stack.replaceChildren(...used.map(([name]) => h("i", name)));
  used.forEach(([, count], at) => { stack.children[at].style.flexGrow = count / total; });
  const shown = total ? used.map(([name, count]) => [name, tiers[name] || name, short(count)]) : [["compute", "no answer has ended yet: the first one computes all, the next begins with what it shares"]];
  refill($("sources-key"), key(shown));
}

export function rate() {
  const [pen, width, height] = fit($("rate-plot")), paint = colours(), now = Date.now() / 1000, base = height - 14;
  pen.clearRect(0, 0, width, height);
  const step = 3, count = SPAN / step, points = Array.from({ length: count }, () => [0, 0]);
  for (let i = 1; i < past.length; i++) {
    const at = count - 1 - Math.floor((now - past[i].at) / step);
    if (at < 0 || at >= count) continue;
    points[at][0] += Math.max(past[i].computed - past[i - 1].computed, 0);
    points[at][1] += Math.max(past[i].reused - past[i - 1].reused, 0);
  }
  const top = nice(Math.max(...points.map(([a, b]) => (a + b) / step), 1)), wide = width / count;
  pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  for (const share of [0, .5, 1]) {
    const y = Math.round(base - share * (base - 8)) + .5;
    pen.fillStyle = paint.edge;
    pen.fillRect(0, y, width, 1);
    pen.fillStyle = paint.faint;
    if (share) pen.fillText(short(top * share), 0, y + 7);
  }
  points.forEach(([computed, reused], at) => {
    const tall = (tokens) => tokens / step / top * (base - 8);
    const x = at * wide, one = tall(computed), two = tall(reused);
    pen.fillStyle = paint.compute;
    pen.fillRect(x, base - one, wide - 1, one);
    pen.fillStyle = paint.device;
    pen.fillRect(x, base - one - two, wide - 1, two);
  });
  pen.fillStyle = paint.faint;
  pen.textBaseline = "alphabetic";
  for (const minutes of [5, 4, 3, 2, 1]) pen.fillText(`${minutes} min`, width - minutes * 60 / SPAN * width + (minutes < 5 ? -10 : 0), height - 1);
  pen.textAlign = "right";
  pen.fillText("now", width, height - 1);
  pen.textAlign = "left";
}

function nice(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((one) => one * size >= value) * size;
}

export function tree({ rows: { contexts }, set: { tokens } }) {
  const none = !contexts || !contexts.size;
  $("tree-empty").hidden = !none;
  $("icicle").hidden = $("chosen").hidden = none;
  if (none) {
    const what = tokens && sum(tokens.sources) ? "Nothing is stored: prompts shorter than a block are not worth it." : "No data yet: what is computed is kept here, from the first prompt on. Try";
    refill($("tree-empty"), [h("span", "", `${what} `), h("code", "", `curl ${location.origin}/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'`)]);
    say($("tree-count"), "");
    return;
  }
  let total = 0, more = 0, ends = new Set(contexts.keys());
  for (const row of contexts.values()) {
    total += row[TOKENS] + row[HIDDEN];
    more += row[HIDDEN];
    ends.delete(row[0]);
  }
  say($("tree-count"), `${short(ends.size)} of them, ${short(total)} tokens${more ? `, ${short(more)} in contexts too small to be shown` : ""}`);
}

export function chosen(node, feed, choose) {
  const side = $("chosen");
  if (!node) {
    refill(side, [h("h3", "", "Select a context"), h("p", "", "Width is tokens. What several begin with lies above all of them; a bright edge was used just now. Click or use the arrow keys; double-click or Enter enlarges.")]);
    return;
  }
  const row = node.row, flags = row[FLAGS];
  const said = [["tokens", `${short(row[TOKENS])}, from ${short(row[START])} to ${short(row[START] + row[TOKENS])}`], ["below", node.children.length ? `${short(node.width - row[TOKENS])} tokens in ${node.children.length === 1 ? "one branch" : `${node.children.length} branches`}` : "nothing: a context ends here"],
    ["lies in", TIERS[row[TIER]] || row[TIER]], ["level", plain(row[LEVEL])], ["size", `${bytes(row[BYTES])}, ${row[BLOCKS]} blocks${flags & STATE ? " and states" : ""}`],
    ["used", row[USED] ? `${ago(row[USED])} ago` : "before the log of requests begins"], ["pinned", flags & PINNED ? "yes" : "no"], ["id", node.id]];
  if (flags & MORE) said.push(["left out", `${short(row[HIDDEN])} tokens below`]);
  const list = h("dl", "");
  for (const [name, value] of said) list.append(h("dt", "", name), h("dd", "", value));
  const users = [...(feed.rows.requests || new Map())].filter(([, one]) => below(node, one[6], feed)).reverse();
  const children = [h("h3", "", label(node)), list];
  if (users.length) {
    children.push(h("p", "", `${users.length} of the last requests go through it, the newest ${ago(users[0][1][0])} ago: ${named(users[0][1][1] || users[0][0])}`));
    if (users[0][1][8]) children.push(h("p", "text", users[0][1][8]));
  }
  refill(side, children);
}

function below(node, id, feed) {
  for (let steps = 0; id && steps < 256; steps++) {
    if (id === node.id) return true;
    const row = feed.rows.contexts && feed.rows.contexts.get(id);
    id = row ? row[0] : "";
  }
  return false;
}

export function running(feed) {
  const { running: now, tokens } = feed.set, [passes, contexts, stalled] = now.passes || [0, 0, 0];
  const last = before(10);
  const figures = [figure(short(now.active - now.queued), "running"), figure(short(now.queued), "queued", now.queued > now.limit / 2)];
  if (now.passes) {
    const [count, size, room] = now.resident;
    figures.push(figure(now.waiting, "wait for a pass"), figure(passes ? (contexts / passes).toFixed(1) : "–", "in a pass"));
    if (now.admission) figures.push(figure(now.admission, "wait for memory", true));
    const resident = figure(short(count), "resident");
    resident.title = `contexts in the engine's memory: ${bytes(size)} of ${bytes(room)}`;
    figures.push(resident);
    if (stalled) figures.push(figure(short(stalled), "stalls"));
  }
  refill($("running-figures"), figures);
  const answers = (now.answers || []).map((one) => [one[0] || `${one[1]}`, one]);
  $("answers").hidden = !answers.length;
  $("answers-empty").hidden = answers.length > 0;
  say($("answers-empty"), now.active ? "The running requests are computing their prompts." : "No request runs.");
  table($("running"), answers, ([name, since, prompt, cached, made]) => {
    const speed = last && last.answers.has(name || since) ? (made - last.answers.get(name || since)) / Math.max(Date.now() / 1000 - last.at, 1) : 0;
    return [[name ? named(name) : "reading the prompt"], [ago(since), "n soft"], [short(prompt), "n"], [prompt ? percent(cached / prompt) : "–", "n"], [short(made), "n"], [speed > 0 ? speed.toFixed(speed < 9.95 ? 1 : 0) : "–", "n"]];
  });
  gaps(tokens);
}

function gaps(tokens) {
  const shown = tokens.gaps && tokens.gaps.length;
  for (const id of ["gaps", "gaps-figures"]) $(id).hidden = !shown;
  document.querySelector("#running h3").hidden = !shown;
  if (!shown) return;
  const first = before(MINUTE);
  const counts = (from) => tokens.gaps.map(([, upto], at) => upto - (at ? tokens.gaps[at - 1][1] : 0) - (from ? from[at][1] - (at ? from[at - 1][1] : 0) : 0));
  let found = counts(first && first.gaps), over = "last minute";
  if (sum(found) < 2) [found, over] = [counts(null), "since the start"];
  const total = sum(found);
  say($("gaps-over"), total ? over : "");
  const quantile = (share) => {
    let left = share * total;
    for (let at = 0; at < found.length; at++) {
      if (left <= found[at]) {
        const low = at ? tokens.gaps[at - 1][0] : 0, high = tokens.gaps[at][0];
        return high == null ? `>${duration(low)}` : duration(low + (high - low) * left / Math.max(found[at], 1));
      }
      left -= found[at];
    }
    return "–";
  };
  refill($("gaps-figures"), total ? [figure(quantile(.5), "median"), figure(quantile(.95), "of 95 % less"), figure(quantile(.99), "of 99 % less")] : [h("span", "soft", "No data yet: they are measured while answers are generated.")]);
  $("gaps").hidden = !total;
  if (!total) return;
  const [pen, width, height] = fit($("gaps")), paint = colours(), wide = width / found.length, top = Math.max(...found);
  pen.clearRect(0, 0, width, height);
  pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
  found.forEach((count, at) => {
    const tall = count / top * (height - 16);
    pen.fillStyle = count ? paint.host : paint.edge;
    pen.fillRect(at * wide, height - 13 - Math.max(tall, 1), wide - 2, Math.max(tall, 1));
  });
  pen.fillStyle = paint.faint;
  for (let at = 1; at < found.length - 1; at += 4) pen.fillText(duration(tokens.gaps[at][0]), at * wide, height - 1);
}

export function requests(feed, choose) {
  const rows = [...(feed.rows.requests || new Map())].sort((a, b) => b[1][0] - a[1][0]);
  const empty = [h("span", "", "No data yet: each request that was answered stands here, with what it reused and why it did not reuse more.")];
  table($("requests"), rows, (row, id) => {
    const [at, session, tokens, cached, sources, why] = row;
    const parts = Object.entries(sources).map(([name, count]) => [name, tokens ? count / tokens : 0]);
    return [[ago(at), "n soft tight"], [named(session || id)], [short(tokens), "n"], [percent(tokens ? cached / tokens : 0), "reuse", parts], [WHY[why] || why || "", "soft"]];
  }, empty, feed.set.daemon.kind === "edge" ? (id) => choose(feed.rows.requests.get(id)[6]) : null);
}

export function sessions(feed, choose) {
  $("sessions").hidden = feed.set.daemon.kind === "cloud";
  const named_ = feed.rows.sessions || new Map(), chats = feed.rows.chats || new Map(), requests = [...(feed.rows.requests || new Map())].reverse();
  names.clear();
  for (const [id, row] of named_) names.set(id, row[0]);
  const tips = new Map(requests.map(([id, row]) => [row[7], [id, row]])), items = [], taken = new Set();
  const add = (id, depth) => {
    const row = named_.get(id), last = requests.find(([, one]) => one[1] === id || one[1] === row[0]);
    items.push([id, { name: row[0], depth, turns: row[1], last: last && last[1], at: row[5], waits: row[6] ? "pinned" : "", text: row[8], run: last ? last[1][6] : "" }]);
    taken.add(id);
    if (depth < 8) for (const [other, one] of order) if (one[2] === id && !taken.has(other)) add(other, depth + 1);
  };
  const order = [...named_].sort((a, b) => b[1][5] - a[1][5]);
  for (const [id, row] of order) if (!named_.has(row[2]) && !taken.has(id)) add(id, 0);
  for (const [number, [tokens, , stop, tool, since, tip]] of [...chats].sort((a, b) => b[1][4] - a[1][4])) {
    const request = tips.get(tip), session = request && request[1][1], item = items.find(([id, one]) => session && (id === session || one.name === session));
    const waits = (WAITS[stop.split(":")[0]] || plain(stop)) + (stop.startsWith("tool") && (tool || stop.split(":")[1]) ? ` (${plain(stop.split(":")[1] || tool)})` : "");
    if (item) Object.assign(item[1], { waits, at: since, tokens, run: request[1][6] });
    else items.push([`chat ${number}`, { name: session || (request ? request[0] : `conversation ${number}`), depth: 0, turns: null, tokens, waits, at: since, run: request ? request[1][6] : "" }]);
  }
  const empty = [h("span", "", "No data yet: conversations stand here with what they wait for, and named ones ("), h("code", "", "POST /api/contexts"), h("span", "", ") with their forks and turns.")];
  table($("sessions"), items, (one) => [
    [`${one.depth ? `${"   ".repeat(one.depth - 1)}└ ` : ""}${one.name}`], [one.turns == null ? "" : one.turns, "n"], [one.tokens || one.last ? short(one.tokens || one.last[2]) : "", "n"],
    [one.waits, "soft"], [ago(one.at), "n soft tight"],
  ], empty, (id) => choose((items.find(([other]) => other === id) || [0, {}])[1].run));
}

export function store({ set: { store } }) {
  if (!store.tiers) return;
  const tiers = Object.entries(store.tiers).map(([name, [size, room, blocks]]) => {
    const line = h("div", "tier", h("span", "soft", TIERS[name]), bar([[name, room ? Math.min(size / room, 1) : 0]]), h("span", "", `${bytes(size)} of ${bytes(room)}`));
    line.title = `${blocks} blocks`;
    return line;
  });
  refill($("tiers"), tiers);
  const figures = [figure(short(store.tokens), "tokens stored"), figure(short(store.hits), "blocks read")];
  if (store.states) figures.push(figure(short(store.states), "states"));
  if (store.recompressed) figures.push(figure(short(store.recompressed), "recompressed"));
  if (store.unwritten) figures.push(figure(bytes(store.unwritten), "that the disk did not take", true));
  if (store.failing) figures.push(figure("failing", "the disk", true));
  refill($("store-figures"), figures);
  const levels = Object.entries(store.levels).map(([name, count]) => ["disk", name === "exact" ? "exact blocks" : plain(name), short(count)]);
  if (store.policy) levels.push(["compute", "evicts by", plain(store.policy)]);
  refill($("levels"), key(levels));
}

export function removals({ set: { store }, rows: { removals, contexts } }) {
  if (!store.tiers) return;
  const counts = [["", "evicted", short(store.evicted)]];
  for (const [why, count] of [...Object.entries(store.dropped), ...Object.entries(store.refused)]) if (count) counts.push(["", plain(why.replace("_", " ")), short(count)]);
  refill($("removals-sum"), key(counts));
  const rows = [...(removals || new Map())].sort((a, b) => b[1][0] - a[1][0]);
  const user = (by) => (contexts && contexts.has(by) && named(contexts.get(by)[WHO])) || by.slice(0, 8);
  table($("removals"), rows, ([at, how, why, blocks, by]) => [
    [ago(at), "n soft tight"], [how, "tight"], [why.replace("_", " "), "soft"], [short(blocks), "n"], [by ? user(by) : "", "soft"],
  ], [h("span", "", "Nothing was removed: the store has room.")]);
}

export function links(feed) {
  const { rows: { links, peers }, set: { daemon } } = feed, last = before(5);
  if (daemon.kind === "cloud") {
    ["device", "tenant", "transfers"].forEach((name, at) => say(document.querySelectorAll("#links th")[at], name));
    return table($("links"), [...(peers || new Map())], ([name, tenant, address, received, sent]) => [[`${name} at ${address}`], [tenant, "tight"], [`↓ ${bytes(received)} ↑ ${bytes(sent)}`]], [h("span", "", "No device is connected. "), h("code", "", "ctxreuse-edge serve --cloud tcp://THIS-HOST:PORT"), h("span", "", " connects one.")]);
  }
  const speed = (name, at, now) => {
    const was = last && last.links.get(name), seconds = last ? Date.now() / 1000 - last.at : 0;
    return was && seconds > .5 ? Math.max(now - was[at], 0) / seconds : 0;
  };
  table($("links"), [...(links || new Map())], ([state, reason, rtt, , came, left, again, , pending, , transfers], name) => {
    const moving = transfers.map(([what, blocks, got]) => `${what} ${blocks}${got ? ` (${bytes(got)})` : ""}`).join(", ");
    const up = `up${rtt == null ? "" : ` · ${duration(rtt)}`}`;
    const all = [`↓ ${bytes(speed(name, 0, came))}/s  ↑ ${bytes(speed(name, 1, left))}/s`, pending ? `${short(pending)} blocks to send` : "", moving, again ? `reconnected ${again} times` : ""];
    return [[name], state === "up" ? [up, "good tight"] : [reason ? `${state}: ${reason}` : state, "bad"], [all.filter(Boolean).join(" · ")]];
  }, [h("span", "", "No cloud is configured; "), h("code", "", "ctxreuse-edge serve --cloud tcp://HOST:7353"), h("span", "", " fetches contexts from one and sends it those of this device.")]);
}

export function backends({ set: { daemon }, rows: { backends } }) {
  $("backends").hidden = daemon.kind !== "cloud";
  if (daemon.kind !== "cloud") return;
  table($("backends"), [...(backends || new Map())], ([state, error, busy, total, failed], name) => [[name], [error ? `${state}: ${error}` : state, /^(up|healthy)$/.test(state) ? "good" : "bad"], [short(busy), "n"], [short(total), "n"], [short(failed), failed ? "n bad" : "n"]],
    [h("span", "", "No inference server stands behind this sidecar; "), h("code", "", "ctxreuse-cloud serve --backend http://HOST:8000"), h("span", "", " puts it in front of one.")]);
}

export function decisions({ set: { daemon }, rows: { decisions } }) {
  $("decisions").hidden = daemon.kind !== "edge";
  const known = [...(decisions || new Map()).values()].filter((row) => row[3] > 0 && row[4] > 0), none = $("decisions").querySelector(".empty");
  none.hidden = known.length > 0;
  $("decisions-plot").hidden = !known.length;
  if (!known.length) {
    say($("decisions-error"), "");
    return refill(none, [h("span", "", "No data yet: each prompt is loaded, fetched or computed, whichever is predicted to be fastest. Here one sees how right that was.")]);
  }
  const errors = known.map((row) => Math.abs(row[3] - row[4]) / row[4]).sort((a, b) => a - b);
  say($("decisions-error"), `${known.length}, half of them within ${percent(errors[Math.floor(errors.length / 2)])}`);
  const ways = [...new Set(known.map((row) => row[1]))];
  refill($("decisions-key"), key(ways.map((way) => [way, WAYS[way] || plain(way), known.filter((row) => row[1] === way).length])));
  const [pen, width, height] = fit($("decisions-plot")), paint = colours(), paints = { load: paint.disk, recompute: paint.device, layers: paint.cloud, tail: paint.peer };
  const all = known.flatMap((row) => [row[3], row[4]]), low = Math.floor(Math.log10(Math.max(Math.min(...all), 1e-5))), high = Math.max(Math.ceil(Math.log10(Math.max(...all))), low + 1);
  const left = 44, bottom = height - 15, x = (value) => left + (Math.log10(Math.max(value, 1e-5)) - low) / (high - low) * (width - left - 6), y = (value) => bottom - (Math.log10(Math.max(value, 1e-5)) - low) / (high - low) * (bottom - 6);
  pen.clearRect(0, 0, width, height);
  pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
  for (let power = low; power <= high; power++) {
    const value = 10 ** power;
    pen.fillStyle = paint.edge;
    pen.fillRect(Math.round(x(value)), 6, 1, bottom - 6);
    pen.fillRect(left, Math.round(y(value)), width - left - 6, 1);
    pen.fillStyle = paint.faint;
    pen.textAlign = "right";
    pen.fillText(duration(value), left - 5, y(value) + 3);
    pen.textAlign = power === high ? "right" : power === low ? "left" : "center";
    pen.fillText(duration(value), x(value), height - 2);
  }
  pen.textAlign = "left";
  pen.strokeStyle = paint.faint;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(x(10 ** low), y(10 ** low));
  pen.lineTo(x(10 ** high), y(10 ** high));
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = .8;
  for (const row of known) {
    pen.fillStyle = paints[row[1]] || paint.text;
    pen.beginPath();
    pen.arc(x(row[3]), y(row[4]), 3, 0, 7);
    pen.fill();
  }
  pen.globalAlpha = 1;
}
