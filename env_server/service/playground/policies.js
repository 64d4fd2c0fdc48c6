// Policies at play: what the server lets play is asked a question, and each turn is shown as it is taken, one column a
// policy. Only there where the server says that it has policies.

import { $, counted, el } from "./dom.js";
import { outcome, signed } from "./episode.js";
import { Refusal, post } from "./server.js";

const OUTCOMES = {
  correct: ["Correct.", "good"],
  wrong: ["Wrong.", "bad"],
  unjudged: ["Answered.", ""],
  out_of_budget: ["No answer: out of steps.", "bad"],
  out_of_tokens: ["No answer: out of tokens.", "bad"],
};

export class Policies {
  #withToken;
  #names;
  #playing = new AbortController();

  // `withToken(work)` runs `work` until the server accepts the token; `names()` are the policies that it has.
  constructor({ withToken, names }) {
    this.#withToken = withToken;
    this.#names = names;
    $("stop").addEventListener("click", () => this.stop());
  }

  // Offer to ask them, and to let them play the question that is picked.
  offer({ picked }) {
    const names = this.#names();
    const who = names.length === 1 ? "the policy" : "the policies";
    $("let-play").textContent = `Let ${who} play`;
    $("ask-title").textContent = `Ask ${who}`;
    $("ask-panel").hidden = names.length === 0;
    $("let-play").hidden = names.length === 0 || !picked;
    $("play-myself").hidden = true;
  }

  // Have all of them play `wanted`: {question_id}, or {question, database}. Throws Refusal.
  async play(wanted) {
    this.stop();
    const own = (this.#playing = new AbortController());
    const judged = Object.hasOwn(wanted, "question_id");
    const lanes = this.#names().map((name) => new Lane(name, judged));
    $("match").replaceChildren(...lanes.map((lane) => lane.element));
    document.body.classList.add("match");
    for (const id of ["match", "stop"]) $(id).hidden = false;
    $("question").focus();
    const plays = lanes.map((lane, number) => this.#playOne(lane, number, wanted, own.signal));
    await Promise.all(plays);
    if (own === this.#playing) $("stop").hidden = true;
  }

  // Interrupt what is under way; what has been shown stays.
  stop() {
    this.#playing.abort();
    $("stop").hidden = true;
  }

  // Make room for a person's episode.
  leave() {
    this.stop();
    document.body.classList.remove("match");
    $("match").hidden = true;
  }

  async #playOne(lane, number, wanted, signal) {
    try {
      const show = (line) => lane.show(JSON.parse(line));
      await this.#withToken(() => post(`policies/${number}/play`, wanted, show, signal));
      lane.end();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      lane.fail(signal.aborted ? "stopped" : error.message);
    }
  }
}

// One policy's column.
class Lane {
  #steps = el("ol", { class: "steps" });
  #state = el("p", { class: "note", role: "status" }, "playing …");
  #ending = el("div", { class: "ending" });
  #over = false;
  #judged;

  // `judged`: its question has a gold, and so its steps rewards worth showing.
  constructor(name, judged) {
    this.#judged = judged;
    this.#ending.hidden = true;
    this.element = el("section", { class: "lane", "aria-label": name, "aria-busy": "true" },
      el("h3", {}, name), this.#steps, this.#state, this.#ending);
  }

  show(event) {
    if (event.type === "turn") this.#turn(event);
    if (event.type === "reply") this.#reply(event);
    if (event.type === "error") this.fail(event.message);
  }

  // The server has said all there is.
  end() {
    if (!this.#over) this.fail("the connection was closed");
  }

  fail(message) {
    this.#close();
    this.#ending.replaceChildren(el("p", { class: "error" }, message));
  }

  #turn({ action, argument, words, parseable, result, error, reward }) {
    const number = el("span", { class: "number" }, String(this.#steps.children.length + 1));
    const step = el("li", { class: "step" }, el("p", { class: "action" }, number, el("b", {}, action), " ",
      el("code", {}, argument)));
    if (!parseable) step.prepend(el("p", { class: "note" }, "no action; taken as a query:"));
    else if (words !== "") {
      step.append(el("details", {}, el("summary", { class: "note" }, "its words"), el("pre", {}, words)));
    }
    if (action !== "ANSWER" || error !== "") step.append(outcome(action, { result, error }));
    if (this.#judged) step.append(el("p", { class: "reward" }, el("b", {}, `reward ${signed(reward)}`)));
    this.#steps.append(step);
    step.scrollIntoView({ block: "nearest" });
  }

  #reply({ outcome: how, answer, query, rows, basis, reward, steps, tokens, seconds }) {
    this.#close();
    const [verdict, className] = OUTCOMES[how] ?? ["The episode is over.", ""];
    const time = seconds === null ? [] : [`${seconds.toFixed(1)} s`];
    const took = [counted(steps, "step"), counted(tokens, "token"), ...time];
    const total = this.#judged ? [`total reward ${signed(reward)}`] : [];
    const said = answer === "" ? [] : rows === ""
      ? [el("p", { class: "answer" }, answer), el("p", { class: "note" }, basis)]
      : [el("p", { class: "note" }, "the answer is what this query returns:")];
    this.#ending.replaceChildren(
      el("p", {}, el("strong", { class: className }, verdict)), ...said,
      ...(query === "" ? [] : [el("pre", {}, query)]),
      ...(rows === "" ? [] : [outcome("QUERY", { result: rows, error: "" })]),
      el("p", { class: "note" }, [...total, ...took].join(", ")),
    );
  }

  #close() {
    this.#over = true;
    this.#state.remove();
    this.element.removeAttribute("aria-busy");
    this.#ending.hidden = false;
    requestAnimationFrame(() => this.#ending.scrollIntoView({ block: "nearest" }));
  }
}
