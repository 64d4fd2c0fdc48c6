// Why episodes failed: over training, and in each evaluation; every number leads to its episodes.

import { html, useEffect, useState } from "./vendor/htm-preact.module.js";
import { Trouble, count, get, link, percent, replaceQuery } from "./core.js";

const KIND_COLORS = {
  right: "#12957a", unparseable: "#6b7a90", out_of_tokens: "#9aa6b4", out_of_steps: "#c3aed6", no_such_column: "#b23b3b",
  no_such_table: "#d96c6c", syntax_error: "#e5989b", other_error: "#f0c4c4", right_rows: "#d9a21b", gave_up: "#8d63bd",
  never_queried: "#2f7fd6", wrong_query: "#d2691e",
};
const LOST = "failed";

export function FailuresPage({ state, address, kinds }) {
  const name = address.query.get("run") ?? (state.sources.findLast((one) => one.is_run) ?? state.sources.at(-1)).name;
  const [found, setFound] = useState({ name: null, data: null, error: null });
  useEffect(() => {
    let over = false;
    get(`api/failures?${new URLSearchParams({ source: name })}`)
      .then((data) => over || setFound({ name, data, error: null }))
      .catch((error) => over || setFound({ name, data: null, error: error.message }));
    return () => { over = true; };
  }, [name, state.version]);
  const { data, error } = found;
  return html`<div class="column">
    <div class="panel"><label class="field inline">Run <select value=${name} onChange=${(event) => replaceQuery(address, { run: event.currentTarget.value })}>
      ${state.sources.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select></label></div>
    <${Trouble} error=${error} />
    ${data && found.name === name && html`
      ${data.over.length > 0 && html`<section class="panel"><h2>Over training</h2>
        <${Bars} over=${data.over} source=${name} kinds=${kinds} /></section>`}
      <section class="panel"><h2>How many of each kind</h2><${Totals} totals=${data.totals} source=${name} kinds=${kinds} />
        <p class="note">Each failed episode has one kind, the first of this list that applies. Every number leads to its episodes.</p></section>`}
  </div>`;
}

function Bars({ over, source, kinds }) {
  const order = ["right", ...Object.keys(kinds)];
  const present = order.filter((kind) => over.some((bar) => bar.counts[kind]));
  const width = 100 / over.length;
  return html`<div class="bars" role="group" aria-label="Shares of the kinds over the training steps">
    ${over.map((bar) => {
      const total = Object.values(bar.counts).reduce((sum, number) => sum + number, 0);
      const steps = bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first} to ${bar.last}`;
      return html`<div class="bar-of" style=${{ width: `${width}%` }}>${present.filter((kind) => bar.counts[kind]).map((kind) => html`<a
        key=${kind} style=${{ flexGrow: bar.counts[kind], background: KIND_COLORS[kind] }}
        title=${`${steps}: ${kinds[kind] ?? kind}, ${percent(bar.counts[kind] / total)} (${bar.counts[kind]} of ${total})`}
        aria-label=${`${steps}: ${kinds[kind] ?? kind} ${bar.counts[kind]}`}
        href=${link("episodes", { source, label: "training", min_step: bar.first, max_step: bar.last, ...wanted(kind) })}></a>`)}</div>`;
    })}</div>
    <p class="note ends"><span>step ${over[0].first}</span><span>step ${over.at(-1).last}</span></p>
    <p class="legend">${present.map((kind) => html`<span key=${kind}><i style=${{ background: KIND_COLORS[kind] }}></i>${kinds[kind] ?? kind}</span>`)}</p>`;
}

function Totals({ totals, source, kinds }) {
  const present = Object.keys(kinds).filter((kind) => totals.some((one) => one.counts[kind]));
  const sums = totals.map((one) => Object.entries(one.counts).reduce((sum, [kind, number]) => (kind === LOST ? sum : sum + number), 0));
  const row = (kind, title, counts) => html`<tr key=${kind}><th scope="row">${KIND_COLORS[kind] && html`<i class="swatch"
    style=${{ background: KIND_COLORS[kind] }}></i>`}${title}</th>
    ${totals.map((one, i) => html`<td>${counts(one) ? html`<a href=${link("episodes", { source, label: one.label, ...wanted(kind) })}>
      ${count(counts(one))}</a> <span class="note">${kind !== LOST && percent(counts(one) / sums[i])}</span>` : "–"}</td>`)}</tr>`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Kinds of failure"><table class="plain numbers-table"
    style=${{ "--columns": totals.length }}><thead><tr><th></th>${totals.map((one, i) => html`<th
    scope="col">${one.label}<br /><span class="note">${count(sums[i])}</span></th>`)}</tr></thead><tbody>
    ${row("right", "right", (one) => one.counts.correct)}
    ${present.map((kind) => row(kind, kinds[kind], (one) => one.counts[kind]))}
    ${totals.some((one) => one.counts[LOST]) && row(LOST, "errored (infrastructure), in no share", (one) => one.counts[LOST])}
  </tbody></table></div>`;
}

function wanted(kind) {
  if (kind === "right") return { outcome: "correct" };
  return kind === LOST ? { outcome: LOST } : { kind };
}
