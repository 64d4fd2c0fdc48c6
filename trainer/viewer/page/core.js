// What all pages share: the address, the server, and how numbers are written. Whatever comes from a run is set as text.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.module.js";

export const COLORS = ["#2f7fd6", "#d2691e", "#12957a", "#8d63bd", "#c94f4f", "#b8901f", "#6b7a90", "#c2528f"];

export const OUTCOMES = {
  correct: "right", wrong: "wrong answer", out_of_budget: "out of steps", out_of_tokens: "out of tokens",
  failed: "errored (infrastructure)",
};

// The page that the address names, with what it asks for.
export function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/");
  return { page: page || "curves", rest, query: new URLSearchParams(query) };
}

export function useAddress() {
  const [address, setAddress] = useState(readAddress);
  useEffect(() => {
    const read = () => setAddress(readAddress());
    window.addEventListener("hashchange", read);
    return () => window.removeEventListener("hashchange", read);
  }, []);
  return address;
}

// Return the address of a page; empty values are left out, lists are repeated.
export function link(path, values = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined) query.append(name, one);
  }
  const text = query.toString();
  return `#/${path}${text === "" ? "" : `?${text}`}`;
}

// Change some of what the address asks for, without a new place in the history.
export function replaceQuery(address, values) {
  const query = new URLSearchParams(address.query);
  for (const [name, value] of Object.entries(values)) {
    query.delete(name);
    for (const one of [value].flat()) if (one !== "" && one !== null) query.append(name, one);
  }
  const text = query.toString();
  history.replaceState(null, "", `#/${[address.page, ...address.rest].join("/")}${text === "" ? "" : `?${text}`}`);
  window.dispatchEvent(new Event("hashchange"));
}

export async function get(path) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store" });
  } catch {
    throw new Error("sqlenv view does not answer; was it stopped?");
  }
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  throw new Error(typeof body.detail === "string" ? body.detail : `the server answered ${response.status}`);
}

// Ask the server again whenever the path or the version changes; what is there stays until the answer comes.
export function useData(path, version) {
  const [found, setFound] = useState({ path: null, data: null, error: null });
  const latest = useRef(0);
  useEffect(() => {
    if (path === null) return;
    const mine = ++latest.current;
    const settle = (value) => { if (mine === latest.current) setFound({ path, ...value }); };
    get(path).then((data) => settle({ data, error: null }), (error) => settle({ data: null, error: error.message }));
  }, [path, version]);
  return { data: found.data, error: found.path === path ? found.error : null, stale: found.path !== path };
}

// Look at the state again and again: every other second, never in a hidden tab.
export function usePolledState() {
  const [found, setFound] = useState({ state: null, error: null });
  useEffect(() => {
    let timer = null;
    let over = false;
    const look = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const state = await get("api/state");
          if (over) return;
          setFound({ state, error: null });
        } catch (error) {
          if (over) return;
          setFound((before) => ({ ...before, error: error.message }));
        }
      }
      timer = setTimeout(look, 2000);
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => { over = true; clearTimeout(timer); document.removeEventListener("visibilitychange", look); };
  }, []);
  return found;
}

// A number with so many decimals; of two that are as near, the even one, as Python writes it in the other tables.
function fixed(value, digits) {
  const scaled = Math.abs(value) * 10 ** digits;
  const even = scaled % 1 === 0.5 && Math.floor(scaled) % 2 === 0 ? Math.floor(scaled) / 10 ** digits : Math.abs(value);
  return (value < 0 ? "-" : "") + even.toFixed(digits);
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${fixed(100 * share, 1)}%`);

export const count = (number) => number.toLocaleString("en");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// A reward with its sign, to four decimals at most.
export function signed(value) {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value).toFixed(4).replace(/0{1,2}$/, "");
  return Number(digits) === 0 ? "0.00" : (value < 0 ? "−" : "+") + digits;
}

export function tone(value) {
  if (!(Math.abs(value) > 1e-9)) return "zero";
  return value < 0 ? "bad" : "good";
}

// A number of any size, short.
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

// A name that a line may break after its slashes, dashes, dots and underscores, and inside a word only where it must.
export const breakable = (name) => name.split(/(?<=[/_.-])/).flatMap((part, i) => (i === 0 ? [part] : [html`<wbr />`, part]));

export const words = (name) => name.replaceAll("_", " ");

export function where({ source, label, step }) {
  return [source, label, step === null || step === undefined ? "" : `step ${step}`].filter(Boolean).join(" · ");
}

export function Trouble({ error }) {
  return error ? html`<p class="banner bad" role="alert">${error}</p>` : null;
}
