// The curves of the runs, overlaid: one chart for each thing that experts watch.

import { html, useEffect, useState } from "./vendor/htm-preact.module.js";
import { Chart } from "./chart.js";
import { COLORS, Trouble, breakable, count, get, link, percent, plural, replaceQuery, short, signed } from "./core.js";

const RATIO = "sampling/importance_sampling_ratio";
const GROUPS = [
  ["Reward", [
    ["reward", "weighted reward"],
    ["rollout/reward", "reward of the environment"],
    ["rewards/*/mean"],
    ["reward_std", "spread of the weighted reward"],
    ["rollout/no_signal", "groups without signal", percent],
    ["reward_weights/*"],
  ]],
  ["Policy", [
    ["kl", "KL from the reference"],
    ["entropy", "entropy"],
    ["rollout/exploration_entropy", "entropy of explorations"],
    [`${RATIO}/mean`, "importance ratio"],
    [`${RATIO}/max`, "importance ratio, largest"],
    ["sampling/sampling_logp_difference/mean", "gap between engine and trainer"],
    ["clip_ratio/region_mean", "tokens clipped", percent],
    ["grad_norm", "gradient norm"],
    ["learning_rate", "learning rate"],
    ["loss", "loss"],
  ]],
  ["Episodes", [
    ["completions/mean_length", "tokens an episode"],
    ["completions/clipped_ratio", "episodes cut off", percent],
    ["rollout/steps", "steps an episode"],
    ["rollout/staleness/mean", "staleness, in updates"],
    ["rollout/failed", "episodes lost"],
  ]],
];
const PARTS = [
  ["training", "#2f7fd6"], ["push", "#8fb8e6"], ["generation", "#12957a"], ["environment", "#d9a21b"],
  ["judging", "#d2691e"], ["queue", "#8d63bd"], ["client", "#c3aed6"], ["other", "#9aa6b4"],
];

export function CurvesPage({ state, address, meanings }) {
  const asked = address.query.getAll("run");
  const all = state.sources.filter((source) => source.is_run);
  const alone = state.sources.filter((source) => !source.is_run);
  const runs = asked.length === 0 ? all.slice(-COLORS.length) : all.filter((source) => asked.includes(source.name));
  const color = (source) => COLORS[all.indexOf(source) % COLORS.length];
  const { curves, error } = useCurves(runs.map((run) => run.name), state.version);
  const toggle = (source) => {
    const names = runs.includes(source) ? runs.filter((one) => one !== source) : [...runs, source];
    replaceQuery(address, { run: names.length === 0 ? ["-"] : names.map((one) => one.name) });
  };
  const drawn = runs.filter((run) => curves[run.name]).map((run) => ({ run, color: color(run), ...curves[run.name] }));
  return html`<div class="side-by-side">
    <aside class="column sources" aria-label="Runs">
      ${all.map((source) => html`<${SourceCard} key=${source.name} source=${source} color=${color(source)}
        shown=${runs.includes(source)} toggle=${() => toggle(source)} />`)}
      ${alone.length > 0 && html`<${Alone} sources=${alone} />`}</aside>
    <div class="column">
      <${Trouble} error=${error} />
      <section class="panel"><h2>Success</h2><div class="charts wide-charts">
        ${drawn.length === runs.length ? html`<${SuccessChart} drawn=${drawn} />` : html`<p class="note">Reading …</p>`}
      </div></section>
      ${GROUPS.map(([title, wanted]) => html`<${Group} key=${title} title=${title} wanted=${wanted} drawn=${drawn}
        meanings=${meanings} />`)}
      ${drawn.some((one) => one.series["time/training"]) && html`<section class="panel"><h2>Time</h2>
        <div class="charts">${drawn.filter((one) => one.series["time/training"]).map((one) => html`<${TimeChart}
          key=${one.run.name} one=${one} />`)}</div>
        <p class="legend">${PARTS.map(([name, color]) => html`<span><i style=${{ background: color }}></i>${name}</span>`)}</p>
      </section>`}
      <${Rest} drawn=${drawn} meanings=${meanings} />
    </div>
  </div>`;
}

function useCurves(names, version) {
  const [found, setFound] = useState({ curves: {}, error: null });
  const key = names.join("\n");
  useEffect(() => {
    let over = false;
    Promise.all(names.map(async (name) => [name, await get(`api/curves?${new URLSearchParams({ source: name })}`)]))
      .then((pairs) => over || setFound({ curves: Object.fromEntries(pairs), error: null }))
      .catch((error) => over || setFound((before) => ({ ...before, error: error.message })));
    return () => { over = true; };
  }, [key, version]);
  return found;
}

function SourceCard({ source, color, shown, toggle }) {
  const total = source.files.reduce((sum, file) => sum + file.episodes, 0);
  const steps = source.step === null ? "" : source.max_steps > 0 ? `step ${source.step} of ${source.max_steps}` : `step ${source.step}`;
  const ends = source.evaluations.filter((one) => !one.during).map((one) => ({ ...one, source: source.name, name: one.label }));
  return html`<section class="panel source">
    <label class="check"><input type="checkbox" checked=${shown} onChange=${toggle} />
      <i class="swatch" style=${{ background: color }}></i><b>${breakable(source.name)}</b></label>
    <p class="note">${[steps, plural(total, "episode")].filter(Boolean).join(" · ")}</p>
    ${source.trouble.map((text) => html`<p class="bad">${text}</p>`)}
    <${Rates} played=${ends} />
    ${source.alerts.length > 0 && html`<details><summary class="bad">${plural(source.alerts.length, "alert")}</summary>
      ${source.alerts.map((one) => html`<p>Step ${one.step}: <b>${one.message}</b> (${one.figures}). ${one.cause}. Fix:
        ${" "}${one.fix.replaceAll("`", "")}.</p>`)}</details>`}
    ${source.facts && html`<details><summary class="note">about this run</summary><dl class="facts-list">
      <div><dt>folder</dt><dd>${source.path}</dd></div>
      ${source.facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></details>`}
  </section>`;
}

// Evaluations by themselves, which have no curve.
function Alone({ sources }) {
  const played = sources.flatMap((source) => (source.evaluations.length === 0 ? [{ name: source.name, source: source.name, label: "", rate: null }]
    : source.evaluations.map((one) => ({ ...one, label: "", source: source.name, name: source.name }))));
  return html`<section class="panel source"><h2>Evaluations</h2>
    ${sources.flatMap((source) => source.trouble).map((text) => html`<p class="bad">${text}</p>`)}
    <${Rates} played=${played} /></section>`;
}

function Rates({ played }) {
  if (played.length === 0) return null;
  return html`<table class="plain"><tbody>${played.map((one) => html`<tr key=${one.name}>
    <th scope="row"><a href=${link("episodes", { source: one.source, label: one.label })}>${breakable(one.name)}</a></th>
    <td><b>${percent(one.rate)}</b></td>
    ${one.rate !== null && html`<td class="note">${(100 * one.low).toFixed(0)}–${(100 * one.high).toFixed(0)}</td>
      <td class="note">n ${count(one.episodes)}</td>`}</tr>`)}</tbody></table>`;
}

function SuccessChart({ drawn }) {
  const lines = [];
  for (const { run, color, success } of drawn) {
    if (success.steps.length > 0) {
      lines.push({ label: `${run.name}, training`, steps: success.steps, values: success.rate, color, band: [success.low, success.high] });
    }
    const played = run.evaluations.filter((one) => one.step !== null && one.step !== undefined || ["before", "after"].includes(one.label));
    const at = (one) => one.step ?? (one.label === "before" ? 0 : run.step ?? 0);
    const points = [...new Map(played.map((one) => [at(one), one])).entries()].sort(([a], [b]) => a - b);
    if (points.length > 0) {
      lines.push({
        label: `${run.name}, evaluations`, steps: points.map(([step]) => step), values: points.map(([, one]) => one.rate), color,
        points: "only", bars: points.map(([step, one]) => [step, one.low, one.high]),
      });
    }
  }
  if (lines.length === 0) return html`<p class="note">No training episodes and no evaluations yet.</p>`;
  const window = Math.max(...drawn.map((one) => one.success.window));
  return html`<${Chart} title="success" lines=${lines} format=${percent} range=${[0, 1]}
    note=${`Lines: training episodes, sampled${window > 1 ? `, mean of ${window} steps` : ""}, with 95% bands. `
      + "Points: evaluations, played greedily on their own questions, with 95% intervals; the two need not meet."} />`;
}

function Group({ title, wanted, drawn, meanings }) {
  const logged = new Set(drawn.flatMap((one) => Object.keys(one.series)));
  const charts = wanted.flatMap(([pattern, label, format]) => matching(pattern, logged).map((name) => ({
    name, label: label ?? named(name), format,
  })));
  if (charts.length === 0) return null;
  return html`<section class="panel"><h2>${title}</h2><div class="charts">${charts.map(({ name, label, format }) =>
    html`<${MetricChart} key=${name} name=${name} label=${label} format=${format} drawn=${drawn} meanings=${meanings} />`)}
  </div></section>`;
}

function MetricChart({ name, label, format, drawn, meanings }) {
  const lines = drawn.filter((one) => one.series[name]).flatMap(({ run, color, series, steps, window }) => {
    const one = series[name];
    const at = one.steps ?? steps;
    const mean = { label: run.name, steps: at, values: one.means, color };
    return window > 1 ? [{ label: `${run.name}, each step`, steps: at, values: one.values, color, faint: true }, mean] : [mean];
  });
  return html`<${Chart} title=${label} lines=${lines} format=${format ?? short} note=${meaning(name, meanings)} />`;
}

function Rest({ drawn, meanings }) {
  const [open, setOpen] = useState(false);
  const logged = [...new Set(drawn.flatMap((one) => Object.keys(one.series)))];
  const drawnAlready = new Set(GROUPS.flatMap(([, wanted]) => wanted.flatMap(([pattern]) => matching(pattern, new Set(logged)))));
  const names = logged.filter((name) => !drawnAlready.has(name) && !name.startsWith("time/"));
  if (names.length === 0) return null;
  return html`<details class="panel" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h2>All other metrics (${names.length})</h2></summary>
    ${open && html`<div class="charts">${names.map((name) => html`<${MetricChart} key=${name} name=${name} label=${name}
      drawn=${drawn} meanings=${meanings} />`)}</div>`}
  </details>`;
}

// The parts of a step's time on top of each other, as rolling means.
function TimeChart({ one }) {
  const parts = PARTS.filter(([name]) => one.series[`time/${name}`]);
  const steps = one.series["time/training"].steps ?? one.steps; // a step logs all of its parts
  const sums = steps.map(() => 0);
  const lines = parts.map(([name, color]) => {
    const { means } = one.series[`time/${name}`];
    const values = means.map((value, i) => (sums[i] += value));
    return { label: name, steps, values, color, shown: new Map(steps.map((step, i) => [step, means[i]])) };
  });
  return html`<${Chart} title=${`seconds a step, ${one.run.name}`} lines=${lines} fill=${true} range=${[0, 0]}
    format=${(value) => short(value)} />`;
}

function matching(pattern, logged) {
  if (!pattern.includes("*")) return logged.has(pattern) ? [pattern] : [];
  const [start, end] = pattern.split("*");
  return [...logged].filter((name) => name.startsWith(start) && name.endsWith(end));
}

function meaning(name, meanings) {
  const found = Object.entries(meanings).find(([pattern]) => pattern === name || (pattern.includes("*") && matching(pattern, new Set([name])).length > 0));
  return found === undefined ? "" : found[1];
}

function named(name) {
  return name.replace(/^rewards\/(?:reward_)?(.+)\/mean$/, "reward for $1").replace(/^reward_weights\/(?:reward_)?/, "weight of ").replaceAll("_", " ");
}
