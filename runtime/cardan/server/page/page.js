// The chat, the tabs and the theme. The live view is in live.js.

import { ask, byId } from "/page/ask.js";
import { startLiveView } from "/page/live.js";

// --- theme and tabs ---

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function setUpTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("cardan-theme");
  setTheme(chosen() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!chosen()) setTheme(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("cardan-theme", next);
    setTheme(next);
  });
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const show = (name) => {
    for (const tab of tabs) {
      const chosen = tab.getAttribute("aria-controls") === name;
      tab.setAttribute("aria-selected", String(chosen));
      byId(tab.getAttribute("aria-controls")).hidden = !chosen;
    }
  };
  const fromAddress = () => show(location.hash === "#engine" ? "engine" : "chat");
  for (const tab of tabs) tab.addEventListener("click", () => { location.hash = tab.getAttribute("aria-controls"); });
  addEventListener("hashchange", fromAddress);
  fromAddress();
}

// --- chat ---

const history = [];
let running = null;

function addTurn(kind) {
  byId("talk").querySelector(".hint")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  byId("talk").append(turn);
  return turn;
}

function part(turn, name, make) {
  return turn.querySelector(`.${name}`) ?? turn.appendChild(make());
}

function element(tag, className) {
  const made = document.createElement(tag);
  made.className = className;
  return made;
}

function reasoningOf(turn) {
  return part(turn, "reasoning", () => {
    const details = element("details", "reasoning");
    details.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }));
    details.append(document.createElement("span"));
    return details;
  }).lastChild;
}

const answerOf = (turn) => part(turn, "answer", () => element("div", "answer"));

function settings() {
  const read = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const text = byId(name).value.trim();
    if (text !== "") read[name] = Number(text);
  }
  return read;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function describeFailure(answer) {
  const text = await answer.text();
  try { return JSON.parse(text).error.message; } catch { return text || `HTTP ${answer.status}`; }
}

async function stream(turn, signal) {
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history];
  const body = { messages, stream: true, stream_options: { include_usage: true }, ...settings() };
  const started = performance.now();
  const answer = await ask("/v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Error(await describeFailure(answer));
  let text = "", first = null, usage = null, finish = null;
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    if (first === null && (delta.content || delta.reasoning_content)) first = performance.now();
    if (delta.reasoning_content) reasoningOf(turn).append(delta.reasoning_content);
    if (delta.content) { text += delta.content; answerOf(turn).append(delta.content); }
    finish = choice?.finish_reason ?? finish;
    usage = event.usage ?? usage;
  }
  showFacts(turn, { started, first, usage, finish });
  return text;
}

function showFacts(turn, { started, first, usage, finish }) {
  if (!usage) return;
  const seconds = (performance.now() - (first ?? started)) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const facts = [`${usage.prompt_tokens} in, ${cached} of them cached`, `${usage.completion_tokens} out`];
  if (first !== null) facts.push(`first after ${((first - started) / 1000).toFixed(2)} s`);
  if (usage.completion_tokens > 1) facts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (finish === "length") facts.push("cut at the most tokens");
  turn.append(Object.assign(element("div", "facts"), { textContent: facts.join(" · ") }));
}

async function send() {
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  history.push({ role: "user", content: text });
  addTurn("user").textContent = text;
  const turn = addTurn("assistant");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    history.push({ role: "assistant", content: await stream(turn, running.signal) });
  } catch (error) {
    if (error.name === "AbortError") {
      history.push({ role: "assistant", content: turn.querySelector(".answer")?.textContent ?? "" });
    } else {
      history.pop();
      turn.classList.add("error");
      turn.append(error.message);
    }
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    turn.scrollIntoView({ block: "end" });
  }
}

function setUpChat() {
  byId("say").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    history.length = 0;
    byId("talk").replaceChildren();
  });
}

setUpTheme();
setUpTabs();
setUpChat();
startLiveView();
