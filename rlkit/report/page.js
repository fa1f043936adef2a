// Builds the page from its data: curves (with uPlot), responses, metrics, options. Text is inserted by textContent only.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#d63384", "#57606a"];
const PROMPTS_AT_ONCE = 20;
const byId = (id) => document.getElementById(id);
const colour = (i) => COLOURS[i % COLOURS.length];

// The reader's choices, which survive the reloads of the page during a run.
const STORED = `rlkit ${location.pathname}`;
const choice = { smoothing: 0.8, filter: "", zoom: null, closed: [], run: 0, kind: "", step: "", rewards: "", low: "", high: "", text: "", order: "newest", prompt: "" };
try { Object.assign(choice, JSON.parse(sessionStorage.getItem(STORED) || "{}")); } catch { /* no storage: nothing is kept */ }
function keepChoice() {
  try { sessionStorage.setItem(STORED, JSON.stringify(choice)); } catch { /* as above */ }
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const figure = (x) => x == null ? "–" : Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4)));

const figureWithInterval = (x, interval) => figure(x) + (interval ? ` (${figure(interval[0])} to ${figure(interval[1])})` : "");

// --- head

function showHead() {
  document.querySelector("h1").textContent = document.title;
  const tiles = byId("tiles");
  const tile = (value, name) => tiles.append(element("div", {}, element("b", { textContent: value }), name));
  if (DATA.runs.length === 1) {
    const run = DATA.runs[0];
    for (const [name, x] of Object.entries(run.evaluation)) {
      if (name === "steps" || /_(error|rows)(_|$)/.test(name) || (x === 0 && /skipped|unscored/.test(name))) continue;
      tile(figureWithInterval(x, run.intervals[name]), name === "heldout" ? "held-out rows" : `held-out ${name.replace(/^heldout_/, "").replaceAll("_", " ")}`);
    }
    if (run.last !== null) tile(run.steps === null ? run.last + 1 : `${run.last + 1} of ${run.steps}`, "steps done");
    const rewards = (run.metrics["reward/mean"] || []).filter((x) => x !== null);
    if (rewards.length) tile(figure(rewards.at(-1)), "mean reward of the last");
  }
  showStatus();
  setInterval(showStatus, 5000);
}

function showStatus() {
  const seconds = Date.now() / 1000 - DATA.written, status = byId("status");
  const ago = seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  const stale = DATA.running && seconds > 3 * DATA.every + 60;
  const state = !DATA.running ? "" : stale ? "No longer written: the run ended early, or a step is very long." : "Running.";
  status.className = stale ? "stale" : DATA.running ? "live" : "";
  const reloads = DATA.running ? " This page reloads itself." : "";
  status.replaceChildren(element("b", { textContent: state }), ` Written ${ago} ago.${reloads}`);
}

let touched = 0;
for (const kind of ["pointermove", "keydown", "scroll"]) addEventListener(kind, () => { touched = Date.now(); }, { passive: true });
if (DATA.running) setInterval(() => {
  const due = Date.now() / 1000 - DATA.written > DATA.every;
  if (due && Date.now() - touched > 10000) location.reload(); // not while somebody is reading
}, 5000);

// --- curves

const charts = [];

function smoothed(values, weight) { // exponential moving average, corrected for its start
  let total = 0, mass = 0;
  return values.map((x) => {
    if (x == null) return null;
    total = weight * total + (1 - weight) * x;
    mass = weight * mass + (1 - weight);
    return total / mass;
  });
}

function columnsOf(name) { // x: the steps of all runs; for each run its values and the smoothed ones
  const having = DATA.runs.map((run, i) => [run, i]).filter(([run]) => name in run.metrics);
  const steps = [...new Set(having.flatMap(([run]) => run.metrics.step))].sort((a, b) => a - b);
  const columns = having.flatMap(([run]) => {
    const at = new Map(run.metrics.step.map((step, i) => [step, run.metrics[name][i]]));
    const values = steps.map((step) => at.get(step) ?? null);
    return [values, smoothed(values, name.startsWith("heldout/") ? 0 : choice.smoothing)]; // evaluations are few
  });
  return { having, columns: [steps, ...columns] };
}

function chart(name, label) {
  const { having, columns } = columnsOf(name);
  const frame = element("div", { className: "chart" }, element("h3", { textContent: label }));
  frame.dataset.metric = name;
  const line = (i, smooth) => ({
    label: DATA.runs.length > 1 ? DATA.runs[i].name : "value", stroke: colour(i) + (smooth ? "" : "66"), width: smooth ? 2 : 1,
    spanGaps: true, points: { show: columns[0].length < 3 }, class: smooth ? "smooth" : "raw", value: (_, x) => figure(x),
  });
  const axis = { font: "11px system-ui", grid: { stroke: "#eaeef2", width: 1 }, ticks: { stroke: "#d8dee4" } };
  const plot = new uPlot({
    width: 380, height: 190, series: [{ label: "step" }, ...having.flatMap(([, i]) => [line(i, false), line(i, true)])],
    scales: { x: { time: false }, y: { range: (_, min, max) => min === max ? [min - 0.5, max + 0.5] : uPlot.rangeNum(min, max, 0.1, true) } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (_, ticks) => ticks.map(figure) }],
    cursor: { sync: { key: "step", scales: ["x", null] }, drag: { x: true, y: false } },
  }, columns, frame);
  const keepZoom = () => setTimeout(() => {
    const { min, max } = plot.scales.x, steps = plot.data[0];
    choice.zoom = min <= steps[0] && max >= steps.at(-1) ? null : [min, max];
    keepChoice();
  });
  plot.over.addEventListener("mouseup", keepZoom);
  plot.over.addEventListener("dblclick", keepZoom);
  plot.over.addEventListener("click", () => {
    if (!plot.select.width && plot.cursor.idx != null) showResponsesOfStep(columns[0][plot.cursor.idx]);
  });
  charts.push({ name, plot, frame });
  return frame;
}

function showCurves() {
  byId("groups").replaceChildren(...DATA.groups.map(([title, metrics]) => {
    const inside = element("div", { className: "charts" });
    const group = element("details", { className: "group", open: !choice.closed.includes(title) },
      element("summary", {}, `${title} `, element("span", { textContent: `${metrics.length}` })), inside);
    let drawn = false;
    const draw = () => {
      if (drawn || !group.open) return;
      drawn = true;
      inside.append(...metrics.map(([name, label]) => chart(name, label)));
      fit();
    };
    group.addEventListener("toggle", () => {
      choice.closed = choice.closed.filter((other) => other !== title).concat(group.open ? [] : [title]);
      keepChoice();
      draw();
    });
    requestAnimationFrame(draw);
    return group;
  }));
  if (DATA.runs.length > 1) byId("runs").replaceChildren(...DATA.runs.map((run, i) => {
    const dot = element("i");
    dot.style.background = colour(i);
    return element("span", {}, dot, run.name);
  }));
}

function fit() { // widths, the zoom and the filter
  for (const { name, plot, frame } of charts) {
    frame.hidden = !name.includes(choice.filter);
    const width = frame.clientWidth - 16;
    if (width > 50 && width !== plot.width) plot.setSize({ width, height: 190 });
    const [min, max] = choice.zoom || [plot.data[0][0], plot.data[0].at(-1)];
    if (plot.data[0].length > 1) plot.setScale("x", { min, max });
  }
}

function bindCurves() {
  const smoothing = byId("smoothing");
  const shown = () => { byId("smoothing-value").textContent = choice.smoothing.toFixed(2); };
  smoothing.value = choice.smoothing;
  shown();
  smoothing.addEventListener("input", () => {
    choice.smoothing = Number(smoothing.value);
    shown();
    keepChoice();
    for (const { name, plot } of charts) plot.setData(columnsOf(name).columns, false), plot.redraw();
  });
  byId("metric-filter").value = choice.filter;
  byId("metric-filter").addEventListener("input", (event) => { choice.filter = event.target.value; keepChoice(); fit(); });
  byId("whole-run").addEventListener("click", () => { choice.zoom = null; keepChoice(); fit(); });
  addEventListener("resize", fit);
}

// --- responses

const scored = (record) => record.responses.map((response) => response.reward).filter((x) => typeof x === "number");
const mean = (xs) => xs.length ? xs.reduce((a, b) => a + b, 0) / xs.length : null;
const promptKey = (record) => JSON.stringify([record.question, record.expected, record.images, record.audios]);
let shownPrompts = PROMPTS_AT_ONCE;

function matching() {
  const records = DATA.runs[choice.run]?.responses.prompts || [];
  const text = choice.text.toLowerCase();
  return records.filter((record) => {
    const rewards = scored(record), average = mean(rewards);
    const differ = rewards.some((x) => x !== rewards[0]);
    return (!choice.kind || record.kind === choice.kind)
      && (choice.step === "" || record.step === Number(choice.step))
      && (!choice.prompt || promptKey(record) === choice.prompt)
      && (choice.rewards !== "differ" || differ)
      && (choice.rewards !== "equal" || (!differ && rewards.length > 0))
      && (choice.rewards !== "unscored" || rewards.length < record.responses.length)
      && (choice.low === "" || (average !== null && average >= Number(choice.low)))
      && (choice.high === "" || (average !== null && average <= Number(choice.high)))
      && (!text || [record.question, ...record.responses.map((response) => response.text)].some((x) => x.toLowerCase().includes(text)));
  });
}

const lowest = (record) => mean(scored(record)) ?? -Infinity; // what could not be scored comes first
const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  lowest: (a, b) => lowest(a) - lowest(b) || b.step - a.step,
  highest: (a, b) => lowest(b) - lowest(a) || b.step - a.step,
  prompt: (a, b) => promptKey(a) < promptKey(b) ? -1 : promptKey(a) > promptKey(b) ? 1 : a.step - b.step,
};

function responseTable(responses) {
  const parts = [...new Set(responses.flatMap((response) => Object.keys(response.parts || {})))];
  const head = ["reward", ...parts, "response", "tokens"].map((name) => element("th", { textContent: name }));
  const rows = [...responses].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)).map((response) => {
    const state = response.reward == null ? "none" : response.reward > 0 ? "high" : "";
    const cut = response.finish_reason === "length" ? " … (cut)" : "";
    return element("tr", {},
      element("td", { className: `number reward ${state}`, textContent: response.reward == null ? "not scored" : figure(response.reward) }),
      ...parts.map((name) => element("td", { className: "number", textContent: figure(response.parts?.[name]) })),
      element("td", {}, element("div", { className: "response-text", textContent: response.text + cut })),
      element("td", { className: "number", textContent: figure(response.tokens) }));
  });
  return element("table", {}, element("tr", {}, ...head), ...rows);
}

function audioPlayer({ file, seconds }) {
  const { audios, audio_seconds } = DATA.runs[choice.run].responses;
  const length = `audio of ${figure(seconds)} s`;
  const caption = (text) => element("div", { className: "where", textContent: text });
  if (!audios[file]) return [caption(file ? `${length}, not on this page: ${file}` : length)];
  const player = element("audio", { src: audios[file], controls: true, title: length });
  return [player, caption(seconds > audio_seconds ? `the first ${audio_seconds} s of an ${length}` : length)];
}

function promptCard(record) {
  const left = element("div");
  const average = mean(scored(record));
  left.append(element("div", { className: "where", textContent: `${record.kind}, step ${record.step} · mean reward ${figure(average)}` }));
  for (const name of record.images) {
    const url = DATA.runs[choice.run].responses.images[name];
    if (!url) continue;
    const image = element("img", { src: url, alt: "image of the prompt" });
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 64));
    left.append(image);
  }
  for (const audio of record.audios) left.append(...audioPlayer(audio));
  left.append(element("div", { className: "question", textContent: record.question }));
  if (record.expected) left.append(element("div", { className: "expected", textContent: `expected: ${record.expected}` }));
  const others = DATA.runs[choice.run].responses.prompts.filter((other) => promptKey(other) === promptKey(record)).length;
  if (others > 1 && !choice.prompt) {
    const same = element("button", { type: "button", textContent: `this prompt in all ${others} places` });
    same.addEventListener("click", () => { Object.assign(choice, NO_FILTERS, { prompt: promptKey(record), order: "oldest" }); showResponses(); });
    left.append(same);
  }
  return element("article", { className: record.responses.length > 1 ? "prompt several" : "prompt" }, left, responseTable(record.responses));
}

const NO_FILTERS = { kind: "", step: "", rewards: "", low: "", high: "", text: "", prompt: "" };
const CONTROLS = { "response-run": "run", "response-kind": "kind", "response-step": "step", "response-rewards": "rewards", "reward-low": "low", "reward-high": "high", "response-text": "text", "response-order": "order" };

function showResponses() {
  keepChoice();
  const responses = DATA.runs[choice.run]?.responses || { prompts: [], kept: 0 };
  const options = (id, values) => byId(id).replaceChildren(...values.map(([value, textContent]) => element("option", { value, textContent })));
  options("response-run", DATA.runs.map((run, i) => [i, run.name]));
  options("response-kind", [["", "training and held-out prompts"], ["training", "training prompts"], ["held-out", "held-out prompts"]]);
  options("response-step", [["", "all"], ...[...new Set(responses.prompts.map((record) => record.step))].sort((a, b) => b - a).map((step) => [step, step])]);
  byId("run-choice").hidden = DATA.runs.length < 2;
  for (const [id, name] of Object.entries(CONTROLS)) byId(id).value = choice[name];
  const found = matching().sort(ORDERS[choice.order]);
  const shown = responses.prompts.length;
  const thinned = shown < responses.kept ? ` samples.jsonl has ${responses.kept}.` : "";
  byId("response-count").textContent = shown ? `${found.length} of the ${shown} prompts on this page.${thinned}` : "No responses were kept.";
  byId("response-list").replaceChildren(...found.slice(0, shownPrompts).map(promptCard));
  byId("more-responses").hidden = found.length <= shownPrompts;
}

function showResponsesOfStep(step) { // the nearest step whose responses were kept
  const steps = (DATA.runs[choice.run]?.responses.prompts || []).filter((record) => record.kind === "training").map((record) => record.step);
  if (!steps.length) return;
  const nearest = steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
  Object.assign(choice, NO_FILTERS, { kind: "training", step: String(nearest) });
  shownPrompts = PROMPTS_AT_ONCE;
  showResponses();
  byId("responses").scrollIntoView();
}

function bindResponses() {
  for (const [id, name] of Object.entries(CONTROLS)) byId(id).addEventListener("input", (event) => {
    if (name === "run") Object.assign(choice, NO_FILTERS);
    choice[name] = name === "run" ? Number(event.target.value) : event.target.value;
    shownPrompts = PROMPTS_AT_ONCE;
    showResponses();
  });
  byId("all-responses").addEventListener("click", () => { Object.assign(choice, NO_FILTERS); showResponses(); });
  byId("more-responses").addEventListener("click", () => { shownPrompts += PROMPTS_AT_ONCE; showResponses(); });
}

// --- all metrics and options

function showNumbers() {
  const names = DATA.groups.flatMap(([, metrics]) => metrics.map(([name]) => name));
  const ends = DATA.runs.length > 1 ? DATA.runs.map((run) => run.name) : ["first", "last", "lowest", "highest"];
  const head = element("tr", {}, ...["metric", ...ends].map((textContent) => element("th", { textContent })));
  const cells = (name) => {
    const known = DATA.runs.map((run) => (run.metrics[name] || []).filter((x) => x !== null));
    if (DATA.runs.length > 1) return known.map((xs) => xs.at(-1));
    const least = (xs, pick) => xs.length ? xs.reduce((a, b) => pick(a, b)) : null;
    return [known[0][0], known[0].at(-1), least(known[0], Math.min), least(known[0], Math.max)];
  };
  byId("metric-table").replaceChildren(head, ...names.map((name) => element("tr", {}, element("td", { textContent: name }),
    ...cells(name).map((x) => element("td", { className: "number", textContent: figure(x) })))));
  if (DATA.runs.length > 1) byId("metric-table").before(element("p", { className: "hint", textContent: "Last value of each run." }));
  for (const run of DATA.runs) {
    const tasks = Object.entries(run.tasks);
    if (!tasks.length) continue;
    const columns = [...new Set(tasks.flatMap(([, found]) => Object.keys(found)))].filter((name) => !/_(error|rows)$/.test(name));
    const row = (tag, cells) => element("tr", {}, ...cells.map((textContent) => element(tag, { textContent })));
    byId("tasks").append(element("table", {}, row("th", [DATA.runs.length > 1 ? run.name : "task", ...columns]),
      ...tasks.map(([task, found]) => row("td", [task, ...columns.map((name) => name in found ? figureWithInterval(found[name], run.task_intervals[task][name]) : "")]))));
  }
  if (DATA.runs.length > 1) {
    const evaluated = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.evaluation)))];
    byId("metric-table").append(...evaluated.map((name) => element("tr", {}, element("td", { textContent: `eval.json ${name}` }),
      ...DATA.runs.map((run) => element("td", { className: "number", textContent: figure(run.evaluation[name]) })))));
  }
}

function showOptions() {
  if (DATA.runs.length === 1) {
    byId("option-list").replaceChildren(element("pre", { textContent: DATA.runs[0].config }));
    return;
  }
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.options)))];
  const different = names.filter((name) => new Set(DATA.runs.map((run) => run.options[name])).size > 1);
  const row = (tag, cells) => element("tr", {}, ...cells.map((textContent) => element(tag, { textContent })));
  byId("option-list").replaceChildren(
    element("p", { className: "hint", textContent: "Options that differ; all others are equal." }),
    element("table", {}, row("th", ["option", ...DATA.runs.map((run) => run.name)]),
      ...different.map((name) => row("td", [name, ...DATA.runs.map((run) => run.options[name] ?? "")]))));
}

showHead();
bindCurves();
showCurves();
bindResponses();
showResponses();
showNumbers();
showOptions();
