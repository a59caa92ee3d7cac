// SPDX-License-Identifier: Apache-2.0
// Reads the server's events and shows them. All text that comes from it goes through textContent.
import { PageMap, SECONDS, ranges } from "./map.js";
import { Story } from "./story.js";

const byId = (id) => document.getElementById(id);
const state = { about: {}, samples: [], tiers: [], requests: [], total: 0, now: 0, asked: false };
const map = new PageMap(byId("map"), byId("map-reading"));
const story = new Story(draw);
map.redraw = drawMap;
let stop = new AbortController();

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// -- what is shown ------------------------------------------------------------------------------

const number = (value) => Math.round(value).toLocaleString();
const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

function lastMinute(field) {
  const since = state.now - 60;
  return state.samples.filter((s) => s.second > since).reduce((sum, s) => sum + s[field], 0);
}

function drawTiles() {
  const last = state.samples.at(-1);
  const queries = lastMinute("queries"), hits = lastMinute("hits");
  const pages = state.about.pages ? `of ${number(state.about.pages)} pages` : "of the pages";
  const tiles = [
    ["Pool in use", last ? percent(last.usage) : "–", pages, last?.usage],
    ["Running", last ? number(last.running) : "–", last ? `${number(last.waiting)} waiting` : ""],
    ["Prefix hits", queries ? percent(hits / queries) : "–",
      queries ? `${number(hits)} of ${number(queries)} tokens in a minute` : "no prompt in the last minute"],
    ["Pages freed", number(freedLately()), "in the last minute"],
    ["Preempted", number(lastMinute("preempted")), "requests in the last minute"],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, note, share]) => {
    const tile = element("div"), shown = element("dd", value);
    if (share !== undefined) {
      const meter = Object.assign(element("meter"), { value: share, high: 0.9 });
      meter.setAttribute("aria-label", name);
      shown.append(meter);
    }
    shown.append(element("small", note));
    tile.append(element("dt", name), shown);
    return tile;
  }));
}

function freedLately() {
  const since = state.now - 60;
  const lately = state.samples.filter((sample) => sample.second > since);
  return lately.flatMap((s) => Object.values(s.tiers)).reduce((sum, tier) => sum + tier.freed, 0);
}

function drawLegend() {
  const bits = [...new Set(state.tiers.filter((t) => t.compresses).map((t) => t.bits))].sort((a, b) => b - a);
  const entries = [
    ["hot", "hot: the newest tokens, whole"],
    ...bits.map((b) => [`cold${b}`, `cold: what is kept of older ones, in ${b} bits`]),
    ["freed", "freed: pages that a full cache would still hold"],
  ];
  byId("legend").replaceChildren(...entries.map(([name, text]) => {
    const item = element("li");
    item.append(element("span", "", `swatch ${name}`), text);
    return item;
  }));
}

const latest = (name) => state.samples.at(-1)?.tiers[name] || { hot: 0, cold: 0, holes: 0 };

function keeps(tier) {
  if (!tier.compresses) return "everything";
  const capped = tier.cap === null ? "" : `, at most ${number(tier.cap)}`;
  return `the newest ${number(tier.window)} tokens, ${percent(tier.keep)} of older ones${capped}, ` +
    `in ${tier.bits} bits`;
}

function drawTiers() {
  byId("tiers").tBodies[0].replaceChildren(...state.tiers.map((tier) => {
    const counts = latest(tier.name), row = element("tr");
    row.append(element("td", ranges(tier.layers)), element("td", tier.name), element("td", keeps(tier)));
    for (const kind of ["hot", "cold", "holes"]) row.append(element("td", number(counts[kind]), "n"));
    return row;
  }));
}

function drawMap() {
  map.draw(state.tiers, state.samples, state.now);
}

function drawRequests() {
  byId("requests").hidden = !state.requests.length;
  byId("requests").tBodies[0].replaceChildren(...state.requests.map(requestRow));
  const hidden = state.total - state.requests.length;
  const others = state.about.engines > 1 ? " Only the first engine's requests are listed." : "";
  byId("requests-note").textContent = (hidden > 0
    ? `${number(hidden)} more are running.`
    : state.requests.length
      ? "Choose one to see which of its tokens are kept. Numbers are tokens, then pages of all tiers."
      : state.asked ? "No request is running." : "Asking the engine …") + others;
}

function requestRow(request) {
  const row = element("tr", undefined, request.id === story.id ? "chosen" : "");
  const button = Object.assign(element("button", request.id), { type: "button", title: request.id });
  button.addEventListener("click", () => choose(request.id));
  const name = element("td");
  name.append(button);
  const pages = [0, 1, 2].map((i) => Object.values(request.tiers).reduce((sum, tier) => sum + tier[i], 0));
  const numbers = [request.prompt, request.end, request.hit, ...pages];
  const full = pages[0] + pages[1] + pages[2], share = full ? (pages[0] + pages[1]) / full : 1;
  const bar = element("td"), meter = Object.assign(element("meter"), { value: share });
  meter.title = percent(share);
  meter.setAttribute("aria-label", "held of a full cache");
  bar.append(meter);
  row.append(name, ...numbers.map((value) => element("td", number(value), "n")), bar);
  return row;
}

function drawServer() {
  byId("main").hidden = !state.about.model;
  const { model, policy } = state.about;
  byId("server").textContent = model ? `${model}, policy ${policy}` : "";
}

function draw() {
  drawServer();
  drawTiles();
  drawLegend();
  drawMap();
  drawTiers();
  drawRequests();
  story.draw(state.tiers, state.requests, state.about.text);
}

function notice(text) {
  byId("notice").textContent = text || "";
  byId("notice").hidden = !text;
}

function status(text, name) {
  byId("status").textContent = text;
  byId("status").className = name;
}

// -- what comes from the server -----------------------------------------------------------------

function hear(message) {
  if (message.about) {
    Object.assign(state, { about: message.about, samples: [] });
    return;
  }
  const first = message.samples[0]?.second ?? Infinity;
  const known = state.samples.filter((sample) => sample.second < first);
  state.samples = [...known, ...message.samples].slice(-SECONDS);
  state.asked ||= message.tiers.length > 0;
  const { now, tiers, requests, total } = message;
  Object.assign(state, { now, tiers, requests, total });
  if (message.story) story.hear(message.story);
  const without = "The server runs with --disable-log-stats, so the map has nothing to draw.";
  notice(message.problem || (state.about.statistics === false ? without : ""));
  status("live", "live");
  draw();
}

async function read(signal) {
  const key = sessionStorage.getItem("entropykv-key");
  const query = story.id === null ? "" : `?request=${encodeURIComponent(story.id)}`;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`entropykv/events${query}`, { headers, signal, cache: "no-store" });
  byId("key-form").hidden = response.status !== 401;
  if (response.status === 401) throw new Error(key ? "The server does not accept this key." : "");
  if (!response.ok) throw new Error((await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) hear(JSON.parse(event.slice("data: ".length)));
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function follow() {
  stop.abort();
  stop = new AbortController();
  const { signal } = stop;
  for (let wait = 1000; !signal.aborted; wait = Math.min(wait * 2, 15000)) {
    try {
      await read(signal);
      wait = 1000;
    } catch (error) {
      if (signal.aborted) return;
      const unreachable = error instanceof TypeError;
      notice(unreachable ? "The server cannot be reached. This page tries again." : error.message);
    }
    if (signal.aborted) return;
    status("not connected", "lost");
    await pause(wait);
  }
}

function choose(id) {
  story.choose(id);
  draw();
  follow();
}

byId("story-close").addEventListener("click", () => choose(null));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("entropykv-key", byId("key").value);
  follow();
});
// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stop.abort();
    status("paused", "");
  } else follow();
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
follow();
