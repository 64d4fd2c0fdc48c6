// Two evaluations question by question, and what two runs were started with differently.

import { html } from "./vendor/htm-preact.module.js";
import { Trouble, link, plural, replaceQuery, useData } from "./core.js";

export function ComparePage({ state, address, kinds }) {
  const files = state.sources.flatMap((source) => source.files.filter((file) => file.label !== "training" || !source.is_run)
    .map((file) => ({ ...file, source })));
  const named = (file) => (file.source.is_run ? `${file.source.name}: ${file.label}` : file.source.name);
  const pick = (name) => files.find((file) => String(file.id) === address.query.get(name));
  const a = pick("a") ?? usual(files).find((file) => file !== pick("b"));
  const b = pick("b") ?? usual(files).findLast((file) => file !== a);
  const ready = a && b && a !== b;
  const { data, error, stale } = useData(ready ? `api/compare?a=${a.id}&b=${b.id}` : null, state.version);
  const runs = ready && a.source !== b.source && a.source.is_run && b.source.is_run;
  const differences = useData(runs ? `api/differences?${new URLSearchParams({ a: a.source.name, b: b.source.name })}` : null, 0);
  const choose = (name, value) => html`<label class="field">${name.toUpperCase()} <select value=${value?.id ?? ""}
    onChange=${(event) => replaceQuery(address, { [name]: event.currentTarget.value })}>
    ${!value && html`<option value="">choose one</option>`}
    ${files.map((file) => html`<option key=${file.id} value=${file.id}>${named(file)}</option>`)}</select></label>`;
  return html`<div class="column">
    <div class="panel pair">${choose("a", a)}${choose("b", b)}</div>
    ${files.length < 2 && html`<p class="panel">There is nothing to compare yet: it takes two evaluations.</p>`}
    ${a && a === b && html`<p class="panel">Choose two different ones.</p>`}
    <${Trouble} error=${error} />
    ${ready && data && !stale && html`<${Comparison} data=${data} kinds=${kinds} />`}
    ${runs && differences.data && html`<${Differing} title="Started with other flags" found=${differences.data} />`}
  </div>`;
}

// What one wants to see first: the last run before and after, else the last two.
function usual(files) {
  const after = files.findLast((file) => file.label === "after");
  const before = after && files.find((file) => file.source === after.source && file.label === "before");
  return before ? [before, after] : files.slice(-2);
}

function Comparison({ data, kinds }) {
  return html`
    <section class="panel">
      <p class="verdict">${data.verdict}</p>
      ${data.warnings.map((text) => html`<p class="bad">${text}</p>`)}
      <div class="wide" tabindex="0" role="region" aria-label="Differences"><table class="plain numbers-table differences">
        <thead><tr><th scope="col">on the same questions</th><th scope="col">A</th><th scope="col">B</th><th scope="col">B - A</th>
          <th scope="col">95% interval</th><th></th></tr></thead>
        <tbody>${data.rows.map(row)}</tbody></table></div>
      <details><summary class="note">By database (${data.by_database.length})</summary><div class="wide" tabindex="0"
        role="region" aria-label="By database"><table class="plain numbers-table differences"><tbody>
        ${data.by_database.map(row)}</tbody></table></div></details>
    </section>
    ${data.settings.length > 0 && html`<${Differing} title="Played differently" found=${data.settings} />`}
    <div class="two flips">
      <${Flips} title="Right in B alone" flips=${data.gained} kinds=${kinds} />
      <${Flips} title="Right in A alone" flips=${data.lost} kinds=${kinds} />
    </div>`;
}

// `better`: 1 where more is better, -1 where less is, 0 for a mean, which has no scale to draw it on.
function row({ cells: [name, a, b, change, interval], mean, interval: ends, better }) {
  const significant = ends[0] > 0 || ends[1] < 0;
  const tone = !significant || better === 0 ? "" : mean * better > 0 ? "good" : "bad";
  return html`<tr><th scope="row">${name}</th><td>${a}</td><td>${b}</td><td class=${tone}>${change}</td><td>${interval}</td>
    <td class="picture">${better !== 0 && html`<${Whisker} mean=${mean} ends=${ends} tone=${tone} />`}</td></tr>`;
}

function Whisker({ mean, ends, tone }) {
  const x = (share) => 50 + 50 * Math.max(-1, Math.min(1, share));
  return html`<svg class=${`whisker ${tone}`} viewBox="0 0 100 12" aria-hidden="true">
    <line class="axis" x1="50" x2="50" y1="0" y2="12" /><line class="span" x1=${x(ends[0])} x2=${x(ends[1])} y1="6" y2="6" />
    <circle cx=${x(mean)} cy="6" r="2.6" /></svg>`;
}

function Flips({ title, flips, kinds }) {
  return html`<section class="panel flush"><div class="list-head"><h2>${title}: ${plural(flips.length, "question")}</h2></div>
    <ol class="episodes tall">${flips.map((flip) => html`<li key=${flip.ids.join()}><a class="episode-row" href=${link(flip.ids.includes(null) ? "episodes" : `episode/${flip.ids.join("/")}`,
      flip.ids.includes(null) ? { question_id: flip.question_id } : {})}>
      <span class="what"><span class="question">${flip.question}</span>
        <span class="note">${[flip.database, flip.difficulty].filter(Boolean).join(" · ")}</span>
        <span class="note">${ending("A", flip.a, kinds)}</span><span class="note">${ending("B", flip.b, kinds)}</span></span></a></li>`)}</ol>
  </section>`;
}

function ending(letter, { failure, steps, last_action: action }, kinds) {
  return html`${letter} <b class=${failure ? "bad" : "good"}>${failure ? kinds[failure] ?? failure : "right"}</b>, ${plural(steps, "step")}: <code>${action}</code>`;
}

function Differing({ title, found }) {
  const text = (value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  return html`<section class="panel"><h2>${title}: ${found.length}</h2>
    ${found.length > 0 && html`<div class="wide" tabindex="0" role="region" aria-label=${title}><table class="plain"><thead><tr><th></th><th scope="col">A</th><th scope="col">B</th></tr></thead>
      <tbody>${found.map((one) => html`<tr key=${one.name}><th scope="row">${one.name}</th><td><code>${text(one.a)}</code></td><td><code>${text(one.b)}</code></td></tr>`)}</tbody></table></div>`}
  </section>`;
}
