// One episode, turn by turn; beside it the gold, and the same question as it was played elsewhere.

import { html, useState } from "./vendor/htm-preact.module.js";
import { OUTCOMES, Trouble, count, link, plural, signed, tone, useData, where, words } from "./core.js";
import { isNumber, parseDescription, parseResult } from "./playground/results.js";

const PART_WORDS = { step_cost: "step", new_information: "new" };
const SHOWN = 12;

export function EpisodePage({ address, state, kinds }) {
  const [id, other] = [address.rest[0], address.rest[1] ?? null];
  const first = useData(`api/episodes/${id}`, 0);
  const second = useData(other === null ? null : `api/episodes/${other}`, 0);
  const gold = useData(`api/episodes/${id}/gold`, 0);
  const live = useData(`api/episodes/${id}`, state.version);
  const { data } = first;
  if (data === null) return html`<${Trouble} error=${first.error} />`;
  return html`<article class="episode-page">
    <div class="asked">
      <section class="panel">
        <p class="facts">${[data.db_id, data.hardness, data.family].filter(Boolean).map((fact) => html`<span class="tag">${fact}</span> `)}
          <span class="id">${data.question_id}</span></p>
        <h1>${data.question}</h1>
        <${Gold} gold=${gold} />
      </section>
      <${Same} data=${live.data ?? data} id=${id} other=${other} kinds=${kinds} />
    </div>
    <div class=${other === null ? "one" : "two"}>
      <${Transcript} data=${data} />
      ${other !== null && html`<div><${Trouble} error=${second.error} />${second.data && html`<${Transcript} data=${second.data}
        close=${link(`episode/${id}`)} />`}</div>`}
    </div>
  </article>`;
}

function Transcript({ data, close = null }) {
  const right = data.outcome === "correct";
  return html`<section class="panel flush transcript" aria-label=${where(data)}>
    <div class="list-head"><div>
      <h2>${where(data)}</h2>
      <p><strong class=${right ? "good" : "bad"}>${right ? "Right." : `${sentence(OUTCOMES[data.outcome] ?? data.outcome)}.`}</strong>
        ${data.why && data.kind !== data.outcome && !data.why.endsWith(OUTCOMES[data.outcome]) && html` ${sentence(data.why)}.`}</p>
      <p class="note">reward <b class=${tone(data.reward)}>${signed(data.reward)}</b> · ${plural(data.turns.length, "step")} ·
        ${" "}${count(data.tokens)} tokens written${data.prompt_tokens !== null && `, ${count(data.prompt_tokens)} read`}</p>
      ${data.failure && html`<p class="error">${data.failure}</p>`}</div>
      ${close !== null && html`<a class="button" href=${close}>Close</a>`}</div>
    <ol class="steps">${data.turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} number=${i + 1}
      given=${i < data.given_steps} />`)}</ol>
    ${data.turns.length === 0 && html`<p class="note pad">No turn was kept.</p>`}
  </section>`;
}

function Turn({ turn, number, given }) {
  const asAction = `${turn.action_type} ${turn.argument}`.trim();
  const plain = turn.parseable && turn.text.trim() === asAction;
  return html`<li class="step">
    <p class="action"><span class="number">${number}</span><b>${turn.action_type}</b><code>${turn.argument}</code></p>
    ${given && html`<p class="note">given, not the policy's (--guided_starts)</p>`}
    ${!turn.parseable && html`<p class="note bad">not in the action format: taken as a raw query</p>`}
    ${!plain && html`<details open=${!turn.parseable}><summary class="note">what it wrote</summary><pre>${turn.text}</pre></details>`}
    <${Outcome} turn=${turn} />
    <p class="reward"><b>reward ${signed(turn.reward.total)}</b>
      ${Object.entries(turn.parts).map(([name, value]) => html`<span class=${tone(value)}>${PART_WORDS[name] ?? words(name)} ${signed(value)}</span>`)}
      ${typeof turn.tokens === "number" && html`<span>${plural(turn.tokens, "token")}</span>`}
      ${turn.policy_version !== undefined && html`<span title="updates that the weights had had">version ${turn.policy_version}</span>`}
      <span class="sum">total ${signed(turn.total)}</span></p>
  </li>`;
}

function Outcome({ turn }) {
  if (turn.error) return html`<p class="error">${turn.error}</p>`;
  if (!turn.result) return null;
  const kind = turn.action_type.trim().toUpperCase();
  const table = kind === "DESCRIBE" ? description(turn.result) : kind === "ANSWER" ? null : parseResult(turn.result);
  return table === null ? html`<pre class="text">${turn.result}</pre>` : html`<${Table} ...${table} />`;
}

function description(text) {
  const found = parseDescription(text);
  if (found === null) return null;
  const notes = [`${found.kind} ${found.table}: ${found.count}`, found.note].filter((note) => note !== "");
  return { columns: ["column", "type", "key"], rows: found.columns.map(({ name, type, key }) => [name, type, key]), notes };
}

function Table({ columns, rows, notes }) {
  const numeric = (columns ?? rows[0] ?? []).map((_, i) => rows.length > 0 && rows.every((row) => row[i] === "NULL" || isNumber(row[i] ?? "")));
  return html`<div class="result"><div class="wide" tabindex="0" role="region" aria-label="Result"><table>
    ${columns && html`<thead><tr>${columns.map((name, i) => html`<th scope="col" class=${numeric[i] ? "number" : ""}>${name}</th>`)}</tr></thead>`}
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => html`<td class=${`${numeric[i] ? "number" : ""} ${cell === "NULL" ? "null" : ""}`}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>${notes.map((note) => html`<p class="note">${note}</p>`)}</div>`;
}

function Gold({ gold }) {
  const { data, error } = gold;
  return html`<div class="gold"><h2>Gold query and answer</h2>
    ${data === null && error === null && html`<p class="note">Loading the data set …</p>`}
    <${Trouble} error=${error} />
    ${data?.why && html`<p class="note">${data.why}</p>`}
    ${data?.sql && html`<pre class="text" id="gold-sql">${data.sql}</pre>`}
    ${data?.count > 0 && html`<${Table} columns=${null} rows=${data.rows} notes=${[
        data.count > data.rows.length ? `the first ${data.rows.length} of ${count(data.count)} rows` : "",
        data.ordered && data.count > 1 ? "in this order" : ""].filter(Boolean)} />`}
  </div>`;
}

function Same({ data, id, other, kinds }) {
  const [all, setAll] = useState(false);
  const rest = data.same.filter((one) => String(one.id) !== id);
  const shown = all ? rest : rest.slice(0, SHOWN);
  return html`<section class="panel"><h2>The same question elsewhere</h2>
    <p class="note">${rest.length === 0 ? "It was played only here." : "Choose one to see it side by side."}</p>
    <ol class="same">${shown.map((one) => html`<li key=${one.id}><a href=${link(`episode/${id}/${one.id}`)}
      aria-current=${String(one.id) === other ? "true" : null}>
      <span class=${one.outcome === "correct" ? "good" : "bad"}>${one.outcome === "correct" ? "✓" : "✗"}</span>
      <span class="what">${where(one)}<span class="note">${one.outcome === "correct" ? "" : kinds[one.kind] ?? OUTCOMES[one.outcome]}</span></span>
      <span class=${tone(one.reward)}>${signed(one.reward)}</span></a></li>`)}</ol>
    ${rest.length > shown.length && html`<button type="button" onClick=${() => setAll(true)}>All ${count(rest.length)}</button>`}
  </section>`;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
