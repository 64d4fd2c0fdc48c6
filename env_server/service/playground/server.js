// The server, as the page sees it: a few GETs and one WebSocket session. Every wait has a deadline.
//
// The token, where the server has one, lives in sessionStorage. A browser cannot set a header on a WebSocket, so there
// the token travels as a subprotocol, never in an address, which logs and histories keep.

const TOKEN_KEY = "sqlenv-token";
const GET_DEADLINE_MS = 10_000;
const REPLY_DEADLINE_MS = 60_000;
const FINAL = ["CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR"];

export class Unauthorised extends Error {}

// The server said no, or cannot be reached; the message is for people.
export class Refusal extends Error {}

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (value) => sessionStorage.setItem(TOKEN_KEY, value.trim()),
  forget: () => sessionStorage.removeItem(TOKEN_KEY),
};

// Return the body of a GET on a path below the page. Throws Unauthorised or Refusal; `accept` names further statuses.
export async function get(path, accept = []) {
  const headers = token.get() === null ? {} : { Authorization: `Bearer ${token.get()}` };
  let response;
  try {
    const signal = AbortSignal.timeout(GET_DEADLINE_MS);
    response = await fetch(new URL(path, document.baseURI), { headers, signal, cache: "no-store" });
  } catch (error) {
    throw new Refusal(error.name === "TimeoutError" ? "the server does not answer" : "the server cannot be reached");
  }
  if (response.status === 401) throw new Unauthorised();
  const body = await response.text();
  if (!response.ok && !accept.includes(response.status)) {
    throw new Refusal(detail(body) || `the server answered ${response.status}`);
  }
  return body;
}

// Post JSON to a path below the page and hand each line of the reply to `onLine` as it comes, until the last one.
// Throws Unauthorised or Refusal; `signal` ends it.
export async function post(path, data, onLine, signal) {
  const headers = { "Content-Type": "application/json" };
  if (token.get() !== null) headers.Authorization = `Bearer ${token.get()}`;
  const request = { method: "POST", headers, body: JSON.stringify(data), signal, cache: "no-store" };
  const response = await connected(fetch(new URL(path, document.baseURI), request));
  if (response.status === 401) throw new Unauthorised();
  if (!response.ok) throw new Refusal(detail(await response.text()) || `the server answered ${response.status}`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await connected(reader.read());
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach(onLine);
  }
}

async function connected(wait) {
  try {
    return await wait;
  } catch {
    throw new Refusal("the connection was closed");
  }
}

// Return the server's load. While it drains it answers 503, and says so in the body.
export async function getReady() {
  return JSON.parse(await get("ready", [503]));
}

// One WebSocket session: one episode at a time, one request after the other.
export class Session {
  #socket;
  #waiting = []; // requests without a reply, in order
  #farewell = null; // why the server closed it, when it said so
  #opened;
  #onClose;

  // `onClose(session, refusal)` is called once, when the session is over and no request is there to be told.
  constructor(onClose) {
    this.#onClose = onClose;
    const url = new URL("ws", document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.hash = "";
    const secret = token.get();
    this.#socket = new WebSocket(url, secret === null ? [] : ["openenv", `bearer.${base64url(secret)}`]);
    this.#opened = new Promise((resolve) => this.#socket.addEventListener("open", resolve));
    this.#socket.addEventListener("message", (event) => this.#receive(event.data));
    this.#socket.addEventListener("close", (event) => this.#end(event));
  }

  get isOpen() {
    return this.#socket.readyState <= WebSocket.OPEN && this.#farewell === null;
  }

  // Send a frame and return the data of its reply. Throws Refusal.
  request(type, data) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        reject(new Refusal(`no answer within ${REPLY_DEADLINE_MS / 1000} seconds`));
        this.close();
      }, REPLY_DEADLINE_MS);
      const settle = (action) => (value) => {
        clearTimeout(timer);
        action(value);
      };
      this.#waiting.push({ resolve: settle(resolve), reject: settle(reject) });
      if (!this.isOpen) this.#end({ reason: "" });
      else this.#opened.then(() => this.#socket.send(JSON.stringify({ type, data })));
    });
  }

  close() {
    this.#socket.close();
  }

  #receive(text) {
    const frame = JSON.parse(text);
    const waiting = this.#waiting.shift();
    if (frame.type !== "error") {
      waiting?.resolve(frame.data);
      return;
    }
    const refusal = new Refusal(frame.data.message);
    // After these, or an error that nobody asked for, the server closes.
    if (waiting === undefined || FINAL.includes(frame.data.code)) this.#farewell = refusal;
    waiting?.reject(refusal);
  }

  #end(event) {
    const why = event.reason === "" ? "the connection was closed" : `the connection was closed: ${event.reason}`;
    this.#farewell ??= new Refusal(why);
    if (this.#waiting.length === 0) this.#onClose(this, this.#farewell);
    for (const { reject } of this.#waiting.splice(0)) reject(this.#farewell);
  }
}

function detail(body) {
  try {
    const found = JSON.parse(body).detail;
    return typeof found === "string" ? found : "";
  } catch {
    return "";
  }
}

function base64url(text) {
  const bytes = new TextEncoder().encode(text);
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
