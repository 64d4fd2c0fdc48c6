// One episode on the page: its steps, results, rewards and tables. Draws what it is told and decides nothing.

import { $, button, counted, el } from "./dom.js";
import { isNumber, parseDescription, parseResult, parseSchema } from "./results.js";

const PARTS = [
  ["step_cost", "step"],
  ["success", "success"],
  ["new_information", "new"],
  ["repeat", "repeat"],
  ["progress", "progress"],
  ["terminal", "terminal"],
];
const VERDICTS = {
  correct: ["Correct.", "good"],
  wrong: ["Wrong.", "bad"],
  out_of_budget: ["Out of steps.", "bad"],
};

export class EpisodeView {
  #act;
  #insert;
  #actions;
  #total = 0;
  #pending = null;

  // `act(type, argument)` is called for a click on a table, `insert(name)` for one on a column; `actions()` are those
  // that the server has.
  constructor(act, insert, actions) {
    this.#act = act;
    this.#insert = insert;
    this.#actions = actions;
  }

  get tables() {
    return [...$("tables").children].map((item) => item.dataset.table);
  }

  // Show the first observation of an episode.
  start(entry, observation) {
    this.#total = 0;
    this.#pending = null;
    $("question").textContent = observation.question;
    $("question-facts").replaceChildren(
      ...[entry.db_id, entry.hardness, entry.split].flatMap((fact) => [el("span", { class: "tag" }, fact), " "]),
      el("span", { class: "id" }, entry.question_id),
    );
    for (const id of ["steps", "rewards", "tables"]) $(id).replaceChildren();
    $("budget").max = observation.step_count + observation.budget_remaining;
    for (const id of ["tables-panel", "rewards-panel", "composer"]) $(id).hidden = false;
    for (const id of ["ending", "intro"]) $(id).hidden = true;
    this.#showTables(observation.schema_info);
    this.#showBudget(observation);
  }

  // Show a question of the person's own, which nobody plays but policies.
  ask(question, database) {
    $("question").textContent = question;
    const tags = [database, "your own"].flatMap((fact) => [el("span", { class: "tag" }, fact), " "]);
    $("question-facts").replaceChildren(...tags);
    for (const id of ["steps", "rewards", "tables"]) $(id).replaceChildren();
    for (const id of ["tables-panel", "rewards-panel", "composer", "ending", "intro"]) $(id).hidden = true;
  }

  // Show an action whose result is not there yet.
  begin(type, argument) {
    this.#pending = el("li", { class: "step", "aria-busy": "true" }, el("p", { class: "action" },
      el("b", {}, type), " ", el("code", {}, argument)), el("p", { class: "note" }, "running …"));
    $("steps").append(this.#pending);
    scrollDown();
  }

  // Take back an action that the server did not take.
  cancel() {
    this.#pending?.remove();
    this.#pending = null;
  }

  // Show the server's reply to the action; return it in a few words.
  finish(type, { observation, reward, done, metadata = {} }) {
    const components = metadata.reward_components ?? {};
    this.#total += reward;
    const item = this.#pending;
    this.#pending = null;
    item.removeAttribute("aria-busy");
    item.lastChild.remove();
    item.firstChild.prepend(el("span", { class: "number" }, String(observation.step_count)));
    item.append(outcome(type, observation), this.#rewardLine(reward, components));
    $("rewards").append(this.#rewardRow(observation.step_count, type, reward, components));
    this.#showTables(observation.schema_info);
    this.#showBudget(observation);
    const [verdict, className] = done ? (VERDICTS[metadata.verdict] ?? ["The episode is over.", ""]) : ["", ""];
    const steps = counted(observation.step_count, "step");
    if (done) this.#end(verdict, className, ` Total reward ${signed(this.#total)} in ${steps}.`);
    scrollDown();
    const gave = observation.error === "" ? summary(type, observation.result) : `error: ${observation.error}`;
    return `Step ${observation.step_count}, ${type}: ${gave}. Reward ${signed(reward)}, total ${signed(this.#total)}.`
      + ` ${observation.budget_remaining} steps left. ${verdict}`;
  }

  // Show that the episode cannot go on.
  abandon() {
    this.#end("The episode broke off.", "bad", "");
  }

  #rewardLine(reward, components) {
    const shown = PARTS.map(([key, label]) => [label, components[key] ?? 0]);
    // One step's operational and progress parts are clipped together; what that took is a part as well.
    shown.push(["clipped", reward - shown.reduce((total, [, value]) => total + value, 0)]);
    const parts = shown.filter(([, value]) => Math.abs(value) > 1e-9);
    const part = ([label, value]) => el("span", { class: sign(value) }, `${label} ${signed(value)}`);
    const words = parts.flatMap((each) => [part(each), " "]);
    return el("p", { class: "reward" }, el("b", {}, `reward ${signed(reward)}`), " ", ...words,
      el("span", { class: "sum" }, `total ${signed(this.#total)}`));
  }

  #rewardRow(step, type, reward, { operational = 0, progress = 0, terminal = 0 }) {
    const values = [operational, progress, terminal, reward, this.#total];
    return el("tr", {}, el("th", { scope: "row" }, `${step} `, el("abbr", { title: type }, type[0])),
      ...values.map((value) => el("td", { class: sign(value) }, signed(value))));
  }

  #showBudget(observation) {
    $("total").textContent = signed(this.#total);
    $("total").className = sign(this.#total);
    $("left-steps").textContent = `${observation.budget_remaining} of ${$("budget").max}`;
    $("budget").value = observation.budget_remaining;
    $("brief-total").textContent = `total ${signed(this.#total)}`;
    $("brief-left").textContent = `${$("left-steps").textContent} steps left`;
  }

  #end(words, className, rest) {
    $("verdict").replaceChildren(el("strong", { class: className }, words), rest);
    $("ending").hidden = false;
    $("composer").hidden = true;
  }

  // Bring the list up to date in place: a button that has the focus keeps it.
  #showTables(schemaInfo) {
    const { names, described } = parseSchema(schemaInfo);
    const known = new Map(described.map((table) => [table.table, table]));
    if (this.tables.join("\n") !== names.join("\n")) {
      $("tables").replaceChildren(...names.map((name) => this.#tableItem(name)));
    }
    for (const item of $("tables").children) {
      const table = known.get(item.dataset.table);
      if (table !== undefined && !item.classList.contains("described")) this.#describe(item, table);
    }
  }

  #tableItem(name) {
    const buttons = this.#actions().filter(({ argument }) => argument === "table").map((action) => {
      const verb = action.name[0] + action.name.slice(1).toLowerCase();
      return button(verb, () => this.#act(action.name, name), { class: "small", "aria-label": `${verb} ${name}` });
    });
    const item = el("li", {}, el("div", { class: "table" }, el("span", { class: "name" }, name), ...buttons));
    item.dataset.table = name;
    return item;
  }

  #describe(item, table) {
    item.classList.add("described");
    item.append(el("p", { class: "note" }, table.count), el("ul", { class: "columns" }, ...table.columns.map((column) =>
      el("li", {}, button(column.name, () => this.#insert(column.name), { class: "plain", title: "into the query" }),
        " ", el("span", { class: "type" }, [column.type, column.key].filter(Boolean).join(", ").toLowerCase())))));
  }
}

// Return a reward with its sign, to four decimals at most.
export function signed(value) {
  const digits = Math.abs(value).toFixed(4).replace(/0{1,2}$/, "");
  if (Number(digits) === 0) return "0.00";
  return (value < 0 ? "−" : "+") + digits;
}

function sign(value) {
  if (Math.abs(value) < 1e-9) return "zero";
  return value < 0 ? "bad" : "good";
}

function summary(type, result) {
  if (type === "ANSWER") return result.replace(/\.$/, "");
  if (type === "DESCRIBE") return result.split("\n")[0];
  const table = parseResult(result);
  if (table === null) return "text";
  return [counted(table.rows.length, "row"), ...table.notes].join(" ");
}

export function outcome(type, { result, error }) {
  if (error !== "") return el("p", { class: "error" }, error);
  if (type === "ANSWER") return el("p", {}, result);
  return (type === "DESCRIBE" ? descriptionTable(result) : resultTable(result)) ?? el("pre", {}, result);
}

function resultTable(text) {
  const parsed = parseResult(text);
  if (parsed === null) return null;
  const numeric = parsed.columns.map((_, i) => parsed.rows.length > 0
    && parsed.rows.every((row) => i >= row.length || row[i] === "NULL" || isNumber(row[i])));
  return grid("Result", parsed.columns, parsed.rows, numeric, parsed.notes);
}

function descriptionTable(text) {
  const parsed = parseDescription(text);
  if (parsed === null) return null;
  const rows = parsed.columns.map(({ name, type, key }) => [name, type, key]);
  const notes = [`${parsed.kind} ${parsed.table}: ${parsed.count}`, parsed.note].filter((note) => note !== "");
  return grid(`Columns of ${parsed.table}`, ["column", "type", "key"], rows, [], notes);
}

function grid(label, columns, rows, numeric, notes) {
  const cell = (text, i) => el("td", { class: (numeric[i] ? "number " : "") + (text === "NULL" ? "null" : "") }, text);
  const head = columns.map((name, i) => el("th", { scope: "col", class: numeric[i] ? "number" : "" }, name));
  return el("div", { class: "result" },
    el("div", { class: "wide", role: "region", "aria-label": label, tabindex: "0" }, el("table", {},
      el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))))),
    ...notes.map((note) => el("p", { class: "note" }, note)));
}

// Bring the newest step into view: its beginning, where it is higher than the view.
function scrollDown() {
  const last = $("ending").hidden ? $("steps").lastElementChild : $("ending");
  const room = Math.min($("scroller").clientHeight, window.innerHeight - $("composer").offsetHeight);
  last.scrollIntoView({ block: last.offsetHeight > room ? "start" : "nearest" });
}
