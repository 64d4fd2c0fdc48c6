// The playground: picks a question, plays its episode over one WebSocket session, and listens to the keyboard.
//
// At most one action is under way. What belongs to an earlier episode is dropped when it arrives. The session is kept
// from episode to episode; starting again while a query runs closes it, which interrupts the query.

import { $, takesText } from "./dom.js";
import { EpisodeView } from "./episode.js";
import { watchLoad } from "./load.js";
import { Policies } from "./policies.js";
import { QuestionList } from "./questions.js";
import { Refusal, Session, Unauthorised, getReady, token } from "./server.js";

const THEMES = ["auto", "light", "dark"];
const ANSWERS = { value: "a value; lists with commas", sql: "a query that yields the answer" };

const view = new EpisodeView(act, insert, () => list.actions);
const list = new QuestionList({ withToken, onChoose: start, onFailure: showNotice });
const policies = new Policies({ withToken, names: () => list.policies });
let session = { isOpen: false, close: () => {} };
let turn = 0; // counts episodes
let entry = null; // the question that is played
let busy = false;
let over = true;
const history = { lines: [], at: 0, draft: "" };

async function start(question) {
  if (busy) session.close();
  busy = true;
  const own = ++turn;
  showNotice("");
  policies.leave();
  try {
    if (!session.isOpen) {
      // A browser does not tell why a WebSocket was refused; this does, and asks for the token.
      await withToken(getReady);
      if (own !== turn) return;
      session = new Session(onClose);
    }
    const { observation } = await session.request("reset", { question_id: question.question_id });
    if (own !== turn) return;
    [entry, over] = [question, false];
    list.mark(question);
    view.start(question, observation);
    policies.offer({ picked: true });
    $("answer").placeholder = ANSWERS[list.answerMode];
    $("status").textContent = observation.schema_info;
    if (matchMedia("(max-width: 759px)").matches) $("picker").open = false;
    $("question").focus();
  } catch (error) {
    if (own === turn) lost(error, "The episode did not start");
  } finally {
    if (own === turn) busy = false;
  }
}

// Let the policies play the question that is picked.
function letPlay() {
  leaveEpisode();
  $("play-myself").hidden = false;
  $("let-play").hidden = true;
  policies.play({ question_id: entry.question_id });
}

// Have them play a question of the person's own.
function askThem() {
  const question = $("ask").value.trim();
  if (question === "") return;
  leaveEpisode();
  entry = null;
  view.ask(question, list.database);
  policies.offer({ picked: false });
  policies.play({ question, database: list.database });
}

// The person's own episode is over, whatever of it is under way.
function leaveEpisode() {
  if (busy) session.close();
  [turn, busy, over] = [turn + 1, false, true];
  showNotice("");
}

async function act(type, argument) {
  if (busy || over) return false;
  busy = true;
  const own = turn;
  showNotice("");
  view.begin(type, argument);
  try {
    const reply = await session.request("step", { action_type: type, argument });
    if (own !== turn) return false;
    over = reply.done;
    $("status").textContent = view.finish(type, reply);
    if (over) $("ending").focus();
    return true;
  } catch (error) {
    if (own === turn) lost(error, "The step was not taken");
    return false;
  } finally {
    if (own === turn) busy = false;
  }
}

// The server may close a session on which nothing is under way, because it was idle for too long.
function onClose(closed, refusal) {
  if (closed === session && !busy && !over) lost(refusal, "The episode cannot go on");
}

// Say what went wrong. An episode ends with its session.
function lost(error, what) {
  if (!(error instanceof Refusal)) throw error;
  view.cancel();
  if (!session.isOpen && !over) {
    over = true;
    view.abandon();
  }
  showNotice(`${what}: ${error.message}`);
}

function showNotice(text) {
  $("notice").textContent = text;
  $("notice").hidden = text === "";
}

// Run `work`, asking for the server's token as often as it refuses.
async function withToken(work) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Unauthorised)) throw error;
      await askForToken();
    }
  }
}

function askForToken() {
  if (token.get() !== null) $("gate-message").textContent = "The server refused that token.";
  token.forget();
  $("gate").showModal();
  return new Promise((resolve, reject) => {
    $("gate-form").onsubmit = (event) => {
      event.preventDefault();
      token.set($("token").value);
      $("token").value = "";
      $("gate").close();
      resolve();
    };
    $("gate").onclose = () => reject(new Refusal("the server needs its token; reload the page to give it"));
  });
}

// --- the two fields ---

function insert(name) {
  const field = $("sql");
  const before = field.value.slice(0, field.selectionStart);
  field.setRangeText(before === "" || /[\s(.,]$/.test(before) ? name : ` ${name}`, field.selectionStart,
    field.selectionEnd, "end");
  fit(field);
  field.focus();
}

// As high as its text, to a bound that the style sheet sets.
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

async function run(field, type) {
  const text = field.value.trim();
  if (text === "" || busy || over) return;
  if (type === "QUERY" && history.lines.at(-1) !== text) history.lines.push(text);
  history.at = history.lines.length;
  if (!(await act(type, text))) return;
  if (field.value.trim() === text) field.value = "";
  fit(field);
}

// Bring back an earlier or a later query; returns whether there is one.
function recall(field, by) {
  const at = history.at + by;
  if (at < 0 || at > history.lines.length) return false;
  if (history.at === history.lines.length) history.draft = field.value;
  history.at = at;
  field.value = history.lines[at] ?? history.draft;
  field.setSelectionRange(field.value.length, field.value.length);
  fit(field);
  return true;
}

function listenTo(field, form, type) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(field, type);
  });
  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      run(field, type);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      field.blur();
    } else if (type === "QUERY" && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      const before = field.value.slice(0, field.selectionStart);
      const after = field.value.slice(field.selectionEnd);
      if (event.key === "ArrowUp" && !before.includes("\n") && recall(field, -1)) event.preventDefault();
      if (event.key === "ArrowDown" && !after.includes("\n") && recall(field, 1)) event.preventDefault();
    }
  });
}

// --- keys ---

const KEYS = {
  q: () => $("sql").focus(),
  a: () => $("answer").focus(),
  "/": () => list.find(),
  n: () => list.any(),
  r: () => entry !== null && start(entry),
  t: () => nextTheme(),
  "?": () => $("help").showModal(),
};

function onKey(event) {
  const { target, code, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat) return;
  if (!$("single-keys").checked || document.querySelector("dialog[open]") || takesText(target)) return;
  const digit = /^Digit([1-9])$/.exec(code);
  if (digit !== null) {
    const table = view.tables[digit[1] - 1];
    if (table !== undefined) act(event.shiftKey ? "SAMPLE" : "DESCRIBE", table);
  } else if (Object.hasOwn(KEYS, key)) {
    event.preventDefault();
    KEYS[key]();
  }
}

// --- theme and settings, kept in this browser ---

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("sqlenv-theme", theme);
  showTheme();
}

function showTheme() {
  $("theme").textContent = `Theme: ${document.documentElement.dataset.theme ?? "auto"}`;
}

listenTo($("sql"), $("query-form"), "QUERY");
listenTo($("answer"), $("answer-form"), "ANSWER");
document.addEventListener("keydown", onKey);
$("let-play").addEventListener("click", letPlay);
$("play-myself").addEventListener("click", KEYS.r);
$("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  askThem();
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  askThem();
});
$("again").addEventListener("click", KEYS.r);
$("next").addEventListener("click", KEYS.n);
$("theme").addEventListener("click", nextTheme);
$("open-help").addEventListener("click", KEYS["?"]);
$("single-keys").checked = localStorage.getItem("sqlenv-single-keys") !== "off";
$("single-keys").addEventListener("change", (event) =>
  localStorage.setItem("sqlenv-single-keys", event.target.checked ? "on" : "off"));
showTheme();
list.load().then(() => policies.offer({ picked: entry !== null })).finally(watchLoad);
