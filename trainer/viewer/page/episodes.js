// Every episode: filters, a search, the list.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";
import { OUTCOMES, Trouble, count, link, percent, plural, replaceQuery, signed, tone, useData, where, words } from "./core.js";

const LIMIT = 100;
const TYPING_MS = 200;
const HARDNESS = ["easy", "medium", "hard", "extra"];
const ORDERS = [
  ["newest", "newest first"], ["oldest", "oldest first"], ["reward_up", "lowest reward first"],
  ["reward_down", "highest reward first"], ["steps_down", "most steps first"], ["tokens_down", "most tokens first"],
];
const FIELDS = [
  "source", "label", "outcome", "kind", "db_id", "hardness", "question_id", "text", "min_step", "max_step", "min_reward",
  "max_reward", "order", "offset",
];

export function EpisodesPage({ address, state, kinds }) {
  const { query } = address;
  const [open, setOpen] = useState(false);
  const wanted = new URLSearchParams();
  for (const name of FIELDS) for (const value of query.getAll(name)) wanted.append(name, value);
  wanted.set("limit", LIMIT);
  const { data, error, stale } = useData(`api/episodes?${wanted}`, state.version);
  const set = (values) => replaceQuery(address, { offset: "", ...values });
  const offset = Number(query.get("offset") ?? 0);
  const sources = query.getAll("source");
  const labels = [...new Set(state.sources.filter((one) => sources.length === 0 || sources.includes(one.name))
    .flatMap((one) => one.files.map((file) => file.label)))];
  const facets = data?.facets ?? { outcome: {}, kind: {}, db_id: {}, hardness: {} };
  const failures = Object.values(facets.kind).reduce((sum, number) => sum + number, 0);
  const chosen = FIELDS.filter((name) => !["order", "offset"].includes(name) && query.has(name));
  const option = (name) => ({ name, value: query.get(name) ?? "", set });
  return html`<div class="side-by-side">
    <form class="column panel filters" onSubmit=${(event) => event.preventDefault()} role="search">
      <label class="field">Search <${Typed} ...${option("text")} type="search" placeholder='words, "a phrase", -without' /></label>
      <button type="button" class="on-phone" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Fewer filters" : "Filters"}${
        chosen.length > 0 && ` (${chosen.length})`}</button>
      <div class=${open ? "column more open" : "column more"}>
      <${Pick} ...${option("source")} label="Run" options=${state.sources.map((one) => [one.name, one.name])} />
      <${Pick} ...${option("label")} label="Played" options=${labels.map((label) => [label, label])} />
      <${Pick} ...${option("outcome")} label="Outcome" options=${counted(facets.outcome, (name) => OUTCOMES[name] ?? name)} />
      <${Pick} ...${option("kind")} label="Failure" options=${[
        ["any", `any (${count(failures)})`], ...counted(facets.kind, (name) => kinds[name] ?? words(name))]} />
      <${Pick} ...${option("db_id")} label="Database" options=${counted(sorted(facets.db_id))} />
      <${Pick} ...${option("hardness")} label="Difficulty" options=${counted(sorted(facets.hardness, HARDNESS))} />
      <div class="pair"><label class="field">Step from <${Typed} ...${option("min_step")} type="number" /></label>
        <label class="field">to <${Typed} ...${option("max_step")} type="number" /></label></div>
      <div class="pair"><label class="field">Reward from <${Typed} ...${option("min_reward")} type="number" step="0.01" /></label>
        <label class="field">to <${Typed} ...${option("max_reward")} type="number" step="0.01" /></label></div>
      <label class="field">Question's id <${Typed} ...${option("question_id")} type="text" /></label>
      ${chosen.length > 0 && html`<button type="button" onClick=${() => set(Object.fromEntries(chosen.map((name) => [name, ""])))}>
        Clear filters</button>`}
      </div>
    </form>
    <div class="column">
      <${Trouble} error=${error} />
      ${data && html`<div class="panel flush" aria-busy=${stale}>
        <div class="list-head"><p id="found"><b>${plural(data.total, "episode")}</b>
          ${data.total > 0 && ` · ${percent(data.right / data.total)} right · mean reward ${signed(data.reward)}`}</p>
          <select aria-label="Order" value=${query.get("order") ?? "newest"} onChange=${(event) => set({ order: event.currentTarget.value })}>
            ${ORDERS.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>
        <ol class="episodes">${data.episodes.map((one) => html`<${Row} key=${one.id} one=${one} kinds=${kinds} />`)}</ol>
        ${data.total > LIMIT && html`<div class="row pages">
          <button type="button" disabled=${offset === 0} onClick=${() => set({ offset: Math.max(0, offset - LIMIT) || "" })}>Previous</button>
          <span class="note">${count(offset + 1)} to ${count(Math.min(offset + LIMIT, data.total))}</span>
          <button type="button" disabled=${offset + LIMIT >= data.total} onClick=${() => set({ offset: offset + LIMIT })}>Next</button>
        </div>`}
      </div>`}
    </div>
  </div>`;
}

export function Row({ one, kinds, href = link(`episode/${one.id}`) }) {
  const right = one.outcome === "correct";
  return html`<li><a class="episode-row" href=${href}>
    <span class=${right ? "mark good" : "mark bad"} aria-hidden="true">${right ? "✓" : one.outcome === "failed" ? "!" : "✗"}</span>
    <span class="what"><span class="question">${one.question}</span>
      <span class="note">${[where(one), one.db_id, one.hardness].filter(Boolean).join(" · ")}</span></span>
    <span class="how">${right ? OUTCOMES.correct : kinds[one.kind] ?? OUTCOMES[one.outcome] ?? one.outcome}</span>
    <span class="numbers"><span class=${tone(one.reward)}>${signed(one.reward)}</span>
      <span class="note">${plural(one.steps, "step")}</span></span>
  </a></li>`;
}

function Pick({ name, label, value, set, options }) {
  const known = options.some(([one]) => one === value) || value === "";
  return html`<label class="field">${label} <select name=${name} value=${value} onChange=${(event) => set({ [name]: event.currentTarget.value })}>
    <option value="">all</option>
    ${!known && html`<option value=${value}>${value} (0)</option>`}
    ${options.map(([one, text]) => html`<option key=${one} value=${one}>${text}</option>`)}
  </select></label>`;
}

// A field that takes effect when one pauses.
function Typed({ name, value, set, ...rest }) {
  const [text, setText] = useState(value);
  const timer = useRef(null);
  useEffect(() => { if (timer.current === null) setText(value); }, [value]);
  const type = (event) => {
    const typed = event.currentTarget.value;
    setText(typed);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => { timer.current = null; set({ [name]: typed }); }, TYPING_MS);
  };
  return html`<input name=${name} value=${text} onInput=${type} autocomplete="off" ...${rest} />`;
}

const counted = (counts, named = (name) => name) => Object.entries(counts).map(([name, number]) => [name, `${named(name)} (${count(number)})`]);

function sorted(counts, order = null) {
  const place = (name) => (order === null ? 0 : (order.indexOf(name) + order.length) % order.length);
  return Object.fromEntries(Object.entries(counts).sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b)));
}
