// Shows what the server sends. Names and reasons come from hosts that nobody here vouches for: they
// become text nodes, never markup.
"use strict";

const CAUSES = ["lost", "failed", "stuck", "left", "evicted", "drained", "excluded", "surplus", "joined"];
const PHASES = ["noticed", "stopped", "last_call", "formed", "started", "first_step"];
const CAUSE_WORDS = { failed: "workers failed", stuck: "did no step", evicted: "left out", surplus: "left over" };
const NAMED = 16;
// As the server names them; the worst comes last.
const STATES = ["running", "ready", "joining", "waiting", "done", "left", "drained", "excluded", "evicted",
  "silent", "unfit", "unknown", "lost"];
const LARGE = 16, MIDDLE = 160, ODD_SHOWN = 24, BARS = 24;
const SVG = "http://www.w3.org/2000/svg";

let chosen = null, events = null, runs = [], run = null, shown = null, store = null;
let sought = "", only = null, local = remembered() === "local";

const $ = (id) => document.getElementById(id);

// Some browsers are set to keep nothing.
function remembered(zone) {
  try {
    if (zone !== undefined) localStorage.setItem("zone", zone);
    return localStorage.getItem("zone");
  } catch {
    return null;
  }
}

// Times are UTC as in the commands, unless switched, and name their zone.
function moment(time) {
  const date = new Date(time), ahead = local ? -date.getTimezoneOffset() : 0;
  const two = (number) => String(Math.trunc(Math.abs(number))).padStart(2, "0");
  const zone = ahead === 0 ? "" : `${ahead < 0 ? "-" : "+"}${two(ahead / 60)}:${two(ahead % 60)}`;
  const shifted = new Date(date.getTime() + ahead * 60000).toISOString();
  return [shifted.slice(0, 10), `${shifted.slice(11, 19)} UTC${zone}`];
}

const hint = $("caption").textContent;
const clock = (time) => moment(time)[1];
const day = (time) => moment(time).join(" ");

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function mark(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) mark(element, name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Children that stay are changed in place: a grid of thousands is not built again each second.
function fill(parent, items, create, change) {
  while (parent.childElementCount > items.length) parent.lastElementChild.remove();
  if (parent.childElementCount < items.length) {
    const fresh = document.createDocumentFragment();
    for (let i = parent.childElementCount; i < items.length; i++) fresh.append(create());
    parent.append(fresh);
  }
  let child = parent.firstElementChild;
  for (const item of items) {
    change(child, item);
    child = child.nextElementSibling;
  }
}

function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 99.5 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

function label(item) {
  return item.rank === null || item.rank === undefined ? item.name : `${item.name} (rank ${item.rank})`;
}

function condition(item) {
  if (item.condition === "closed") return item.outcome || (item.last || {}).outcome || "closed";
  return item.told || item.condition === "unreadable" ? item.condition : "watching";
}

function pill(element, item) {
  mark(element, "data-condition", condition(item));
  say(element, condition(item));
}

function showFilters() {
  const counts = new Map();
  for (const item of runs) counts.set(condition(item), (counts.get(condition(item)) || 0) + 1);
  // What is asked for stays, also while no run is so.
  if (only !== null && !counts.has(only)) counts.set(only, 0);
  fill($("filters"), [[null, runs.length], ...[...counts].sort()],
    () => make("button", { type: "button" }),
    (element, [name, count]) => {
      element.only = name;
      mark(element, "data-condition", name);
      mark(element, "aria-pressed", String(name === only));
      say(element, `${name || "all"} ${count}`);
    });
  $("filters").hidden = counts.size < 2;
  $("search").hidden = runs.length < 2 && sought === "";
}

function showRuns() {
  showFilters();
  const words = sought.toLowerCase().split(/\s+/);
  const found = runs.filter((item) => (only === null || condition(item) === only) &&
    words.every((it) => `${item.run} ${item.sentence}`.toLowerCase().includes(it)));
  say($("count"), found.length === runs.length ? String(runs.length) : `${found.length} of ${runs.length}`);
  $("unmatched").hidden = found.length > 0 || runs.length === 0;
  fill(
    $("runs"),
    found,
    () => make("li", {}, make("a", {}, make("span", { class: "top" }, make("b", {}),
      make("span", { class: "pill" })), make("small", {}))),
    (element, item) => {
      const link = element.firstElementChild;
      mark(link, "href", `#${encodeURIComponent(item.run)}`);
      const fresh = item.run === chosen && item.run !== shown;
      mark(link, "aria-current", item.run === chosen ? "true" : null);
      if (fresh) link.scrollIntoView({ block: "nearest" });
      mark(link, "title", item.run);
      say(link.querySelector("b"), item.run);
      pill(link.querySelector(".pill"), item);
      say(link.querySelector("small"), item.sentence);
    },
  );
  shown = chosen;
  const none = runs.length === 0 ? "There are no runs under this prefix." : "Choose a run.";
  say($("nothing"), chosen !== null && runs.length > 0 && run === null
    ? `There is no run '${chosen}' in the list of runs.` : none);
  $("nothing").hidden = run !== null;
}

function facts(items) {
  fill($("facts"), items, () => make("div", {}, make("dt", {}), make("dd", {})),
    (element, [name, value]) => {
      say(element.firstElementChild, name);
      say(element.lastElementChild, value);
    });
}

// Those that the last round lost have no record any more; no count has them, as in the command.
function withLost(nodes, newest) {
  const row = newest.find((it) => it.phase === "running");
  if (row === undefined || run.phase === "closed" || nodes.length === 0) return nodes;
  const here = new Set(nodes.map((node) => node.name));
  const gone = (row.lost || []).filter((member) => !here.has(member.name));
  return [...nodes, ...gone.map((member) => ({
    ...member, rank: null, was: member.rank, state: "lost", odd: true, last_beat: null, silence: null,
    clock: null, leader: false, awaited: false, gone: true,
  }))];
}

function lastBeat(node) {
  if (node.last_beat === null) return node.silence === null ? "" : `no beat for ${node.silence.toFixed(1)} s`;
  return `last beat ${clock(node.last_beat)}`;
}

function showNode(element, node, size) {
  const plain = lastBeat(node);
  mark(element, "data-state", node.state);
  mark(element, "data-odd", node.odd ? "" : null);
  mark(element, "data-leader", node.leader ? "" : null);
  const was = node.was === undefined || node.was === null ? "" : `was rank ${node.was}`;
  const rank = node.rank === null ? was : `rank ${node.rank}`;
  const notes = [rank, node.leader ? "leads" : "", node.awaited ? "awaited" : "", node.unfit, node.kept_out];
  const about = [node.name, ...notes, node.state, plain].filter(Boolean).join(" · ");
  if (element.about !== about) {
    element.about = about;
    mark(element, "title", about);
  }
  if (size === "large") {
    if (element.childElementCount !== 3) {
      element.replaceChildren(make("b", {}), make("small", {}), make("small", {}));
    }
    const [name, what, when] = element.children, why = node.unfit || node.kept_out;
    say(name, node.name);
    say(what, [rank, node.state, node.leader ? "leads" : "", why === node.state ? "" : why].filter(Boolean).join(" · "));
    say(when, plain || " ");
    return;
  }
  say(element, size === "middle" && !node.odd && node.rank !== null ? String(node.rank) : "");
}

function showGrid(grid, nodes, size) {
  if (grid.dataset.size !== size) {
    grid.replaceChildren();
    grid.dataset.size = size;
  }
  fill(grid, nodes, () => make("div", { class: "node" }), (element, node) => showNode(element, node, size));
}

function showWorld(nodes) {
  $("world").hidden = nodes.length === 0;
  const size = nodes.length <= LARGE ? "large" : nodes.length <= MIDDLE ? "middle" : "small";
  const ranked = nodes.filter((node) => node.rank !== null);
  const others = nodes.filter((node) => node.rank === null);
  showGrid($("grid"), ranked, size);
  showGrid($("others"), others, size);
  $("grid").hidden = ranked.length === 0;
  $("others-title").hidden = others.length === 0;
  say($("others-title"), ranked.length === 0 ? "no ranks yet" : "not in this round");
  const here = nodes.filter((node) => !node.gone);
  const counts = STATES.map((state) => [state, here.filter((node) => node.state === state).length]);
  fill($("legend"), counts.filter(([, count]) => count > 0), () => make("li", {}),
    (element, [state, count]) => {
      mark(element, "data-state", state);
      say(element, `${count} ${state}`);
    });
  // Each of a few nodes has a card; among many, those that need a look come first.
  const worst = (node) => STATES.indexOf(node.state);
  const odd = size === "large" ? [] : nodes.filter((node) => node.odd).sort((a, b) => worst(b) - worst(a));
  showGrid($("odd"), odd.slice(0, ODD_SHOWN), "large");
  $("odd").hidden = odd.length === 0;
  $("odd-more").hidden = odd.length <= ODD_SHOWN;
  say($("odd-more"), `and ${odd.length - ODD_SHOWN} more`);
}

function point(event) {
  const node = event.target.closest(".node");
  say($("caption"), node === null ? hint : node.about);
}

// A ceiling that is 1, 2 or 5 times a power of ten.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((it) => it >= value * 0.999);
}

function causeOf(row) {
  return CAUSES.find((cause) => (row[cause] || []).length > 0) || "none";
}

function plot(svg) {
  const width = svg.clientWidth || 460, height = svg.clientHeight || 190;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { width, height, left: 34, right: width - 8, top: 16, bottom: height - 22, parts: [] };
}

function level(at, text, shape) {
  shape.parts.push(
    draw("line", { class: "axis", x1: shape.left, x2: shape.right, y1: at, y2: at }),
    draw("text", { x: shape.left - 6, y: at + 4, "text-anchor": "end" }, text),
  );
}

// Nodes that were there: they fall when nodes are lost, and rise when a round runs.
function showSizes(rows) {
  const svg = $("sizes-plot"), shape = plot(svg);
  const times = run.sizes.map(([at]) => Date.parse(at)), sizes = run.sizes.map(([, count]) => count);
  const live = run.condition !== "closed" && store !== null;
  const ends = [times[times.length - 1], ...rows.map((row) => Date.parse(row.at)), live ? Date.parse(store.at) : 0];
  const first = times[0], last = Math.max(...ends);
  const most = Math.max(1, ...sizes, run.max_nodes && run.max_nodes <= 4 * Math.max(...sizes) ? run.max_nodes : 0);
  const x = (at) => shape.left + 6 + ((shape.right - shape.left - 14) * (at - first)) / Math.max(1, last - first);
  const y = (size) => shape.bottom - ((shape.bottom - shape.top) * size) / most;
  const step = most <= 5 ? 1 : ceiling(most / 4);
  for (let size = 0; size <= most; size += step) level(y(size), String(size), shape);
  if (run.min_nodes) {
    const at = y(run.min_nodes);
    shape.parts.push(
      draw("line", { class: "limit", x1: shape.left, x2: shape.right, y1: at, y2: at }),
      draw("text", { x: shape.right, y: at - 5, "text-anchor": "end" }, `minimum ${run.min_nodes}`),
    );
  }
  let path = `M${x(first)},${y(sizes[0])}`;
  for (let i = 1; i < times.length; i++) path += `H${x(times[i])}V${y(sizes[i])}`;
  path += `H${x(last)}`;
  shape.parts.push(
    draw("path", { class: "area", d: `${path}V${y(0)}H${x(first)}Z` }),
    draw("path", { class: "step", d: path }),
  );
  rows.forEach((row) => {
    const size = row.phase === "closed" ? 0 : row.nodes;
    const dot = draw("circle", { class: "event", cx: x(Date.parse(row.at)), cy: y(size), r: 5.5, "data-cause": causeOf(row) });
    dot.append(draw("title", {}, `round ${row.round}, ${clock(row.at)}: ${row.reason || ""}`));
    shape.parts.push(dot);
  });
  shape.parts.push(
    draw("text", { x: shape.left, y: shape.height - 4 }, day(first)),
    draw("text", { x: shape.right, y: shape.height - 4, "text-anchor": "end" }, live ? "now" : clock(last)),
  );
  svg.replaceChildren(...shape.parts);
  const found = new Set(rows.map(causeOf));
  fill($("causes"), CAUSES.filter((cause) => found.has(cause)), () => make("li", {}), (element, cause) => {
    mark(element, "data-cause", cause);
    say(element, CAUSE_WORDS[cause] || cause);
  });
}

function phasesOf(row) {
  const { noticed = 0, gathering, last_call, confirming, started, first_step } = row.seconds;
  const stopped = Math.max(0, gathering - last_call);
  return { noticed, stopped, last_call, formed: confirming, started: started || 0, first_step: first_step || 0 };
}

function totalOf(row) {
  return PHASES.reduce((sum, phase) => sum + phasesOf(row)[phase], 0);
}

function showForming(rows) {
  const svg = $("forming-plot"), shape = plot(svg);
  const totals = rows.map(totalOf);
  const most = ceiling(Math.max(0.001, ...totals) * 1.02);
  const y = (value) => shape.bottom - ((shape.bottom - shape.top) * value) / most;
  const unit = most >= 1 ? "s" : "ms";
  for (const part of [0, 0.5, 1]) {
    const value = most * part * (unit === "s" ? 1 : 1000);
    level(y(most * part), part === 0 ? `0 ${unit}` : String(Number(value.toPrecision(3))), shape);
  }
  const room = (shape.right - shape.left - 8) / Math.max(rows.length, 4);
  const wide = Math.min(44, room * 0.62);
  rows.forEach((row, i) => {
    const middle = shape.left + 8 + room * (i + 0.5), phases = phasesOf(row);
    const group = draw("g", {});
    let under = 0;
    for (const phase of PHASES) {
      if (phases[phase] <= 0) continue;
      const height = Math.max(1, y(0) - y(phases[phase]));
      group.append(draw("rect", {
        class: "bar", "data-phase": phase, x: middle - wide / 2, width: wide,
        y: y(under) - height, height, rx: Math.min(2, height / 2),
      }));
      under += phases[phase];
    }
    group.append(draw("title", {}, `round ${row.round}: ` +
      PHASES.map((phase) => `${phase.replace("_", " ")} ${seconds(phases[phase])}`).join(", ")));
    if (room > 34) group.append(draw("text", { class: "value", x: middle, y: y(under) - 5, "text-anchor": "middle" }, seconds(totals[i])));
    if (room > 16) group.append(draw("text", { x: middle, y: shape.height - 4, "text-anchor": "middle" }, String(row.round)));
    shape.parts.push(group);
  });
  svg.replaceChildren(...shape.parts);
}

function chips(row) {
  const found = [];
  for (const cause of CAUSES) {
    for (const member of row[cause] || []) {
      found.push(make("span", { class: "chip", "data-cause": cause },
        make("b", {}, CAUSE_WORDS[cause] || cause), ` ${label(member)}`));
    }
  }
  return found;
}

function showRow(element, row) {
  const text = JSON.stringify([row, local]);
  if (element.shown === text) return;
  element.shown = text;
  const [round, when, nodes, formed, lost, why] = element.children;
  const end = row.phase === "closed";
  say(round, end ? "end" : String(row.round));
  mark(round, "data-label", end ? null : "round ");
  say(when, day(row.at));
  say(nodes, end ? "" : String(row.nodes));
  say(formed, row.seconds ? seconds(totalOf(row)) : "");
  say(lost, String(row.lost_steps ?? ""));
  const reason = end ? `${row.outcome || "closed"}: ${row.reason || ""}` : row.reason || "";
  const found = end ? [] : chips(row);
  // A row names sixteen nodes of a cause at most; its reason says how many more there are.
  const all = found.length > 0 && CAUSES.every((cause) => (row[cause] || []).length < NAMED);
  why.replaceChildren(...found, ...(all ? [] : [make("span", { class: "why" }, reason)]));
  mark(why, "title", reason);
}

function showRun() {
  $("run").hidden = run === null;
  if (run === null) return;
  say($("name"), run.run);
  pill($("condition"), run);
  say($("sentence"), run.sentence);
  const nodes = run.nodes || [];
  const leader = nodes.find((node) => node.leader);
  const last = run.last || {};
  const limits = run.min_nodes === run.max_nodes ? `${run.min_nodes}` : `${run.min_nodes}..${run.max_nodes}`;
  facts([
    ["round", run.round ?? last.round],
    run.since ? [`${run.phase} since`, day(run.since)] : ["phase", run.phase ?? last.phase],
    ["last call until", run.last_call_until ? day(run.last_call_until) : null],
    ["--nnodes", run.min_nodes ? limits : null],
    ["MASTER", run.master],
    ["leader", leader ? leader.name : null],
    ["steps", run.steps ? run.steps.text : null],
    ["why this round", run.reason],
    ["began", run.began ? day(run.began) : null],
    ["goodput", typeof run.goodput === "number" ? `${(100 * run.goodput).toFixed(1)} %` : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [name, String(value)]));
  for (const [id, odd] of [["clocks", run.clocks], ["degraded", run.away]]) {
    say($(id), odd || "");
    $(id).hidden = !odd;
  }
  const newest = run.rounds || [];
  showWorld(withLost(nodes, newest));
  const rows = [...newest].reverse();
  $("sizes").hidden = run.sizes.length === 0;
  if (run.sizes.length > 0) showSizes(rows);
  const formed = rows.filter((row) => row.seconds).slice(-BARS);
  $("forming").hidden = formed.length === 0;
  if (formed.length > 0) showForming(formed);
  $("history").hidden = rows.length === 0;
  fill($("rounds"), newest, () => make("tr", {}, ...["number", "number", "number", "number", "number", ""].map((name) => make("td", { class: name }))), showRow);
  document.title = `${run.run} · rdzv`;
}

function showStore() {
  say($("zone"), local ? "local" : "UTC");
  mark($("zone"), "aria-pressed", String(local));
  if (store === null) return;
  const { store: where, at, away } = store;
  say($("where"), where);
  mark($("live"), "data-live", away === null ? "yes" : "away");
  say($("live"), `${away === null ? "live" : "store away"} · ${clock(at)}`);
  $("away").hidden = away === null;
  say($("away"), away === null ? "" : `store away since ${clock(away.since)}: ${away.error}`);
}

function chooseOne() {
  if (chosen !== null || runs.length === 0) return;
  const live = runs.find((item) => ["running", "forming"].includes(item.condition));
  listen((live || runs[0]).run);
}

function listen(id) {
  if (events !== null) events.close();
  if (id !== chosen) run = null;
  chosen = id;
  showRun();
  events = new EventSource(id === null ? "/events" : `/events?run=${encodeURIComponent(id)}`);
  events.addEventListener("store", (event) => {
    store = JSON.parse(event.data);
    showStore();
  });
  events.addEventListener("runs", (event) => {
    runs = JSON.parse(event.data);
    showRuns();
    chooseOne();
  });
  events.addEventListener("run", (event) => {
    run = JSON.parse(event.data);
    showRun();
    showRuns();
  });
  events.onerror = () => {
    mark($("live"), "data-live", "no");
    const refused = events.readyState === EventSource.CLOSED;
    say($("live"), refused ? "rdzv dashboard refuses this browser: load the page again" : "rdzv dashboard does not answer");
  };
}

function fromAddress() {
  const text = location.hash.slice(1);
  try {
    return text === "" ? null : decodeURIComponent(text);
  } catch {
    return null;
  }
}

$("search").addEventListener("input", (event) => {
  sought = event.target.value.trim();
  showRuns();
});
$("filters").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button === null) return;
  only = button.only;
  showRuns();
});
$("zone").addEventListener("click", () => {
  local = !local;
  remembered(local ? "local" : "UTC");
  showStore();
  showRun();
});
window.addEventListener("hashchange", () => listen(fromAddress()));
window.addEventListener("resize", showRun);
for (const id of ["grid", "others"]) {
  $(id).addEventListener("mouseover", point);
  $(id).addEventListener("mouseleave", point);
}
showStore();
listen(fromAddress());
