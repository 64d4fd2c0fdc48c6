// The curves of the runs, overlaid: one chart for each thing that experts watch.

import { html, useEffect, useState } from "./vendor/htm-preact.module.js";
import { Chart } from "./chart.js";
import { COLORS, Trouble, breakable, count, get, link, percent, plural, replaceQuery, short } from "./core.js";

export function CurvesPage({ state, address, words }) {
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
      ${words.charts.map((title) => html`<${Group} key=${title} title=${title} drawn=${drawn} />`)}
      ${drawn.some((one) => one.series["time/training"]) && html`<section class="panel"><h2>Time</h2>
        <div class="charts">${drawn.filter((one) => one.series["time/training"]).map((one) => html`<${TimeChart}
          key=${one.run.name} one=${one} parts=${words.times} />`)}</div>
        <p class="legend">${words.times.map(([name, color]) => html`<span><i style=${{ background: color }}></i>${name}</span>`)}</p>
      </section>`}
      <${Rest} drawn=${drawn} />
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

function Group({ title, drawn }) {
  const charts = Object.entries(Object.assign({}, ...drawn.map((one) => one.charts[title])))
    .filter(([name]) => drawn.some((one) => one.series[name]));
  if (charts.length === 0) return null;
  return html`<section class="panel"><h2>${title}</h2><div class="charts">${charts.map(([name, label]) =>
    html`<${MetricChart} key=${name} name=${name} label=${label} drawn=${drawn} />`)}</div></section>`;
}

function MetricChart({ name, label, drawn }) {
  const lines = drawn.filter((one) => one.series[name]).flatMap(({ run, color, series, window }) => {
    const { steps, values, means } = series[name];
    const mean = { label: run.name, steps, values: means, color };
    return window > 1 ? [{ label: `${run.name}, each step`, steps, values, color, faint: true }, mean] : [mean];
  });
  const { meaning } = drawn.find((one) => one.series[name]).series[name];
  return html`<${Chart} title=${label} lines=${lines} format=${label.startsWith("share") ? percent : short} note=${meaning} />`;
}

function Rest({ drawn }) {
  const [open, setOpen] = useState(false);
  const shown = new Set(drawn.flatMap((one) => Object.values(one.charts).flatMap(Object.keys)));
  const names = [...new Set(drawn.flatMap((one) => Object.keys(one.series)))].filter((name) => !shown.has(name) && !name.startsWith("time/"));
  if (names.length === 0) return null;
  return html`<details class="panel" open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h2>All other metrics (${names.length})</h2></summary>
    ${open && html`<div class="charts">${names.map((name) => html`<${MetricChart} key=${name} name=${name} label=${name}
      drawn=${drawn} />`)}</div>`}
  </details>`;
}

// The parts of a step's time on top of each other, as rolling means.
function TimeChart({ one, parts }) {
  const { steps } = one.series["time/training"]; // a step logs all of its parts
  const sums = steps.map(() => 0);
  const lines = parts.filter(([name]) => one.series[`time/${name}`]).map(([name, color]) => {
    const { means } = one.series[`time/${name}`];
    const values = means.map((value, i) => (sums[i] += value));
    return { label: name, steps, values, color, shown: new Map(steps.map((step, i) => [step, means[i]])) };
  });
  return html`<${Chart} title=${`seconds per step, ${one.run.name}`} lines=${lines} fill=${true} range=${[0, 0]}
    format=${(value) => short(value)} />`;
}
