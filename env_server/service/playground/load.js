// The server's load, live: what /ready and /metrics say, every two seconds, while the page can be seen.
//
// Rates and latencies are over the last WINDOW readings, so that they show now and not the whole life of the server.

import { $, svg } from "./dom.js";
import { buckets, by, parseMetrics, quantile, sum } from "./metrics.js";
import { Unauthorised, get, getReady } from "./server.js";

const PERIOD_MS = 2000;
const WINDOW = 5;
const HISTORY = 30; // readings in the sparkline: one minute
const STEPS = "sqlenv_steps_total";
const LATENCY = "sqlenv_step_seconds";
const REFUSALS = "sqlenv_refused_total";

const readings = []; // {at, steps, latency}, the newest last
const rates = [];
let timer = 0;
let polling = false;

// Keep showing the load, from now on.
export function watchLoad() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) poll();
  });
  poll();
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    const [ready, metrics] = await Promise.all([getReady(), get("metrics")]);
    show(ready, parseMetrics(metrics));
  } catch (error) {
    showState(error instanceof Unauthorised ? "asks for its token" : error.message, "bad");
  }
  polling = false;
  if (!document.hidden) timer = setTimeout(poll, PERIOD_MS);
}

function show(ready, samples) {
  const now = { at: performance.now(), steps: sum(samples, STEPS) ?? 0, latency: buckets(samples, LATENCY) };
  const before = readings.at(-1);
  if (before !== undefined) {
    // A replaced worker takes its counts along: a fall is no negative rate.
    rates.push(Math.max(0, now.steps - before.steps) / ((now.at - before.at) / 1000));
    if (rates.length > HISTORY) rates.shift();
  }
  readings.push(now);
  if (readings.length > WINDOW + 1) readings.shift();

  const [sessions, capacity] = [ready.active_sessions, ready.max_sessions];
  if (ready.status !== "ready") showState(ready.status, "bad");
  else if (sessions >= capacity) showState("full", "bad");
  else showState("ready", "good");
  $("load-sessions").textContent = `${count(sessions)} of ${count(capacity)}`;
  $("load-bar").replaceChildren(bar(sessions / capacity));
  $("load-waiting").textContent = count(ready.waiting);
  $("load-steps").textContent = rates.length === 0 ? "–" : rate(windowRate(now));
  $("load-spark").replaceChildren(sparkline(rates));
  $("load-p50").textContent = seconds(quantile(0.5, readings[0].latency, now.latency));
  $("load-p99").textContent = seconds(quantile(0.99, readings[0].latency, now.latency));
  const reasons = [...by(samples, REFUSALS, "reason")].map(([reason, number]) => `${reason} ${count(number)}`);
  $("load-refusals").textContent = count(sum(samples, REFUSALS));
  $("load-reasons").textContent = reasons.join(", ").replaceAll("_", " ");
}

function windowRate(now) {
  const first = readings[0];
  return Math.max(0, now.steps - first.steps) / ((now.at - first.at) / 1000);
}

function showState(text, className) {
  $("server-state").textContent = text;
  $("server-state").className = `state ${className}`;
}

function count(number) {
  return number === null ? "–" : number.toLocaleString("en");
}

function rate(number) {
  return number < 100 ? number.toFixed(1) : count(Math.round(number));
}

function seconds(value) {
  if (value === null) return "–";
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toPrecision(2)} ms`;
}

function bar(share) {
  const width = 100 * Math.min(1, share || 0);
  return picture("0 0 100 6", svg("rect", { width: 100, height: 6, class: "ground" }),
    svg("rect", { width, height: 6, class: share >= 1 ? "full" : "fill" }));
}

function sparkline(values) {
  const top = Math.max(...values, 1);
  const points = values.map((value, i) => `${i + HISTORY - values.length},${(23 - (21 * value) / top).toFixed(1)}`);
  return picture(`0 0 ${HISTORY - 1} 24`, svg("path", { d: `M0 23.5H${HISTORY}`, class: "axis" }),
    svg("polyline", { points: points.join(" "), class: "line" }));
}

function picture(viewBox, ...shapes) {
  return svg("svg", { viewBox, preserveAspectRatio: "none", "aria-hidden": "true" }, ...shapes);
}
