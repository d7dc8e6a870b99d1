// The live view: asks once a second what the engine does, and draws it.

import { ask, byId } from "/page/ask.js";

const EVERY_MS = 1000;
const KEPT = 120;
const WIDTH = 300, HEIGHT = 110, BELOW = 16;
const SVG = "http://www.w3.org/2000/svg";
const points = [];

const number = (value) => Number(value).toLocaleString("en");
const seconds = (value) => value == null ? "–" : value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;

function fill(list, pairs) {
  byId(list).replaceChildren(...pairs.flatMap(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
}

function rows(table, cells) {
  byId(table).tBodies[0].replaceChildren(...cells.map((row) => {
    const line = document.createElement("tr");
    for (const cell of row) line.insertCell().textContent = cell;
    return line;
  }));
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw(id, shapes, label) {
  const chart = byId(id);
  chart.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT + BELOW}`);
  chart.setAttribute("aria-label", label);
  chart.replaceChildren(shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), ...shapes);
}

function lines(id, series, unit) {
  const most = Math.max(1, ...series.flatMap(({ values }) => values));
  const step = WIDTH / (KEPT - 1);
  const shapes = series.map(({ values, second }) => shape("path", {
    class: second ? "second" : "first",
    d: values.map((value, i) =>
      `${i ? "L" : "M"}${WIDTH - (values.length - 1 - i) * step} ${HEIGHT - value / most * (HEIGHT - 14)}`).join(""),
  }));
  const now = series.map(({ name, values }) => `${name}${number(Math.round((values.at(-1) ?? 0) * 10) / 10)}`).join(", ");
  shapes.push(shape("text", { x: 0, y: 10 }, `most ${number(Math.round(most))}`));
  shapes.push(shape("text", { x: 0, y: HEIGHT + 13 }, `now ${now} ${unit}; the last ${KEPT} s`));
  draw(id, shapes, `now ${now} ${unit}`);
}

function histogram(id, latency) {
  if (!latency || !latency.count) {
    draw(id, [shape("text", { x: 0, y: HEIGHT / 2 }, "nothing yet")], "nothing yet");
    return;
  }
  const { bounds_s: bounds, counts } = latency;
  const used = counts.map((count, i) => [count, i]).filter(([count]) => count).map(([, i]) => i);
  const from = Math.max(0, used[0] - 1), to = Math.min(counts.length - 1, used.at(-1) + 1);
  const shown = counts.slice(from, to + 1), most = Math.max(...shown), wide = WIDTH / shown.length;
  const shapes = shown.flatMap((count, i) => {
    const high = count / most * (HEIGHT - 14), at = bounds[from + i];
    const bar = shape("rect", { x: i * wide + 1, y: HEIGHT - high, width: wide - 2, height: high });
    bar.append(shape("title", {}, `${number(count)} within ${at == null ? "more" : seconds(at)}`));
    return i % Math.ceil(shown.length / 6) ? [bar]
      : [bar, shape("text", { x: i * wide + 1, y: HEIGHT + 13 }, at == null ? "more" : `≤ ${seconds(at)}`)];
  });
  const mean = `mean ${seconds(latency.sum_s / latency.count)} of ${number(latency.count)}`;
  shapes.push(shape("text", { x: 0, y: 10 }, mean));
  draw(id, shapes, mean);
}

function showPool({ used_tokens: used, cached_tokens: cached, max_total_tokens: all }) {
  const share = (part) => `${all ? (100 * part / all).toFixed(1) : 0}%`;
  byId("pool").replaceChildren(...[["used", used], ["cached", cached]].map(([name, count]) => {
    const piece = document.createElement("div");
    piece.className = name;
    piece.style.width = share(count);
    return piece;
  }));
  byId("pool").setAttribute("aria-label", `${share(used)} used, ${share(cached)} cached`);
  fill("pool-legend", [
    ["held by running requests", `${number(used)} tokens, ${share(used)}`],
    ["cached prefixes", `${number(cached)} tokens, ${share(cached)}`],
    ["free", `${number(all - used - cached)} of ${number(all)}`],
  ]);
}

function showNow(live) {
  const totals = live.stats?.totals ?? {};
  const prompts = totals.prompt_tokens ?? 0;
  const hits = prompts ? `${(100 * (totals.cached_prompt_tokens ?? 0) / prompts).toFixed(1)}%` : "–";
  fill("now", [
    ["up for", `${number(Math.round(live.uptime_s))} s`],
    ["open requests", number(live.open_requests)],
    ["running / waiting", live.stats ? `${number(live.stats.num_running)} / ${number(live.stats.num_queued)}` : "busy"],
    ["requests since the start", number(totals.requests ?? 0)],
    ["prompt tokens", number(prompts)],
    ["of them from the prefix cache", hits],
    ["output tokens", number(totals.generated_tokens ?? 0)],
    ["retractions", number(totals.retractions ?? 0)],
    ["replayed graphs", number(totals.graph_replays ?? 0)],
  ]);
}

function remember(stats) {
  const now = performance.now(), before = points.at(-1), total = stats.totals.generated_tokens ?? 0;
  const rate = before ? Math.max(0, total - before.total) / ((now - before.now) / 1000) : 0;
  points.push({ now, total, rate, running: stats.num_running, queued: stats.num_queued });
  if (points.length > KEPT) points.shift();
}

function show(live) {
  byId("model").textContent = live.model;
  const word = !live.alive ? "engine dead" : live.draining ? "shutting down" : live.stats ? "ready" : "busy";
  setStatus(word, word === "ready" || word === "busy");
  showNow(live);
  if (live.stats) {
    remember(live.stats);
    showPool(live.stats);
    const values = (name) => points.map((point) => point[name]);
    lines("throughput", [{ name: "", values: values("rate") }], "tokens/s");
    lines("queue", [
      { name: "running ", values: values("running") }, { name: "waiting ", values: values("queued"), second: true },
    ], "requests");
  }
  histogram("ttft", live.latencies.time_to_first_token);
  histogram("itl", live.latencies.inter_token);
  rows("recent", live.recent.map((one) => [
    one.choice ? `${one.rid} #${one.choice}` : one.rid, number(one.prompt_tokens), number(one.cached_tokens),
    number(one.completion_tokens), seconds(one.first_token_s), seconds(one.e2e_s), one.finish_reason ?? "runs",
  ]));
}

function setStatus(word, good) {
  byId("status").textContent = word;
  byId("status").className = `status ${good ? "good" : "bad"}`;
}

async function showPlan() {
  const answer = await ask("/server_info");
  if (!answer.ok) return;
  const { plan } = await answer.json();
  const text = (value) => value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const settings = Object.entries(plan.settings ?? {}).map(([name, one]) => [name, text(one.value), one.source, one.why]);
  rows("plan", [["platform", text(plan.platform), "", ""], ...settings]);
}

export async function startLiveView() {
  let planned = false;
  for (;;) {
    try {
      const answer = await ask("/page/live");
      if (!answer.ok) throw new Error(String(answer.status));
      show(await answer.json());
      if (!planned) { planned = true; await showPlan(); }
    } catch (error) {
      setStatus(`no answer (${error.message})`, false);
    }
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 5 * EVERY_MS : EVERY_MS));
  }
}
