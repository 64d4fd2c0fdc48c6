// Picking a question: the databases, the questions of one, a filter, and any of them by chance.
//
// The list is one stop of the Tab key; the arrow keys move in it. The address keeps the choice: #DATABASE/QUESTION.

import { $, button, counted, el } from "./dom.js";
import { Refusal, get } from "./server.js";

const PAGE = 200;

export class QuestionList {
  #withToken;
  #onChoose;
  #onFailure;
  #database = "";
  #total = 0;
  #questions = [];
  answerMode = "value";
  policies = [];
  actions = [];

  // `withToken(work)` runs `work` until the server accepts the token; `onChoose(question)` plays one;
  // `onFailure(text)` tells why there is no list.
  constructor({ withToken, onChoose, onFailure }) {
    this.#withToken = withToken;
    this.#onChoose = onChoose;
    this.#onFailure = onFailure;
    $("database").addEventListener("change", () => this.#guarded(() => this.#open($("database").value)));
    $("filter").addEventListener("input", () => this.#guarded(() => this.#filter()));
    $("filter").addEventListener("keydown", (event) => this.#leaveFilter(event));
    $("questions").addEventListener("keydown", (event) => this.#move(event));
    $("more").addEventListener("click", () => this.#guarded(() => this.#more()));
    $("random").addEventListener("click", () => this.any());
  }

  // Fetch the databases and show one; play the question that the address names.
  async load() {
    await this.#guarded(async () => {
      const first = await this.#fetch({ limit: 0 });
      this.answerMode = first.answer_mode;
      this.policies = first.policies;
      this.actions = first.actions;
      $("actions").replaceChildren(...first.actions.map(({ name, argument, shows }) =>
        el("div", {}, el("dt", {}, `${name} ${argument}`), el("dd", {}, shows))));
      $("dataset").textContent = [first.dataset,
        counted(first.databases.length, "database"), counted(first.total, "question")].join(" · ");
      if (first.total === 0) {
        $("question").textContent = "Ask a question";
        $("intro").hidden = true;
      }
      const databases = first.databases.sort((one, other) => one.id.localeCompare(other.id));
      $("database").replaceChildren(
        ...databases.map(({ id, questions }) => el("option", { value: id }, `${id} (${questions})`)),
      );
      const [database, question] = location.hash.slice(1).split("/").map(decoded);
      const known = databases.some(({ id }) => id === database);
      if (databases.length > 0) await this.#open(known ? database : databases[0].id);
      if (known) await this.#playById(question);
    });
  }

  // Mark the question that is played, in the list and in the address.
  mark(question) {
    const address = [question.db_id, question.question_id].map(encodeURIComponent).join("/");
    window.history.replaceState(null, "", `#${address}`);
    for (const item of this.#items) {
      const chosen = item.dataset.question === question.question_id;
      item.toggleAttribute("aria-current", chosen);
      if (chosen) this.#rest(item);
    }
  }

  // The database that is chosen.
  get database() {
    return this.#database;
  }

  // Go to the filter.
  find() {
    $("picker").open = true;
    $("filter").focus();
    $("filter").select();
  }

  // Play any question of the list as it is filtered.
  any() {
    return this.#guarded(async () => {
      if ($("filter").value.trim() !== "") {
        const shown = this.#shown;
        if (shown.length > 0) shown[Math.floor(Math.random() * shown.length)].click();
        return;
      }
      if (this.#total === 0) return;
      const offset = Math.floor(Math.random() * this.#total);
      const known = this.#questions[offset];
      const found = known ? [known] : (await this.#fetch({ db: this.#database, offset, limit: 1 })).questions;
      this.#onChoose(found[0]);
    });
  }

  get #items() {
    return [...$("questions").querySelectorAll("button")];
  }

  get #shown() {
    return this.#items.filter((item) => !item.parentElement.hidden);
  }

  async #guarded(work) {
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.#onFailure(`The questions cannot be listed: ${error.message}`);
    }
  }

  async #fetch(parameters) {
    return JSON.parse(await this.#withToken(() => get(`questions?${new URLSearchParams(parameters)}`)));
  }

  async #open(database) {
    this.#database = database;
    this.#questions = [];
    $("database").value = database;
    $("filter").value = "";
    $("questions").replaceChildren();
    await this.#more();
  }

  async #more() {
    const database = this.#database;
    const offset = this.#questions.length;
    const found = await this.#fetch({ db: database, offset, limit: PAGE });
    if (database !== this.#database || offset !== this.#questions.length) return;
    this.#total = found.total;
    this.#questions.push(...found.questions);
    $("questions").append(...found.questions.map((question) => this.#item(question)));
    if (offset === 0 && this.#items.length > 0) this.#rest(this.#items[0]);
    for (const id of ["filter-field", "questions", "random"]) $(id).hidden = this.#total === 0;
    const left = this.#total - this.#questions.length;
    $("more").hidden = left <= 0;
    $("more").textContent = `${left} more`;
  }

  #item(question) {
    const label = [el("span", {}, question.text), " ", el("span", { class: "tag" }, question.hardness)];
    const item = button("", () => this.#onChoose(question), { class: "question", tabindex: "-1" });
    item.replaceChildren(...label);
    item.dataset.question = question.question_id;
    return el("li", {}, item);
  }

  async #playById(id) {
    const wanted = () => this.#questions.find((question) => question.question_id === id);
    await this.#fetchUntil(() => wanted() !== undefined);
    if (wanted() !== undefined) this.#onChoose(wanted());
  }

  // Fetch pages until `enough`, or there are no more.
  async #fetchUntil(enough) {
    const database = this.#database;
    while (database === this.#database && this.#questions.length < this.#total && !enough()) await this.#more();
  }

  async #filter() {
    const words = () => $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words().length > 0) await this.#fetchUntil(() => false);
    for (const item of this.#items) {
      const text = item.textContent.toLowerCase();
      item.parentElement.hidden = !words().every((word) => text.includes(word));
    }
    if (this.#shown.length > 0) this.#rest(this.#shown[0]);
  }

  #leaveFilter(event) {
    if (event.isComposing) return;
    if (event.key === "Escape") event.target.blur();
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    if (event.key === "Enter") this.#shown[0]?.click();
    else this.#shown[0]?.focus();
  }

  #move(event) {
    const shown = this.#shown;
    const at = shown.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to < 0) $("filter").focus();
    else if (shown[to] !== undefined) this.#rest(shown[to]).focus();
  }

  // Make one question the stop of the Tab key.
  #rest(item) {
    for (const other of this.#items) other.tabIndex = other === item ? 0 : -1;
    return item;
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
