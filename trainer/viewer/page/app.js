// The page: where one is, and what is there to see.

import { html, render, useEffect, useState } from "./vendor/htm-preact.module.js";
import { Trouble, count, link, useAddress, useData, usePolledState } from "./core.js";
import { ComparePage } from "./compare.js";
import { CurvesPage } from "./curves.js";
import { EpisodePage } from "./episode.js";
import { EpisodesPage } from "./episodes.js";
import { FailuresPage } from "./failures.js";

const PAGES = [["curves", "Curves"], ["episodes", "Episodes"], ["failures", "Failures"], ["compare", "Compare"]];
const THEMES = ["auto", "light", "dark"];

function View() {
  const address = useAddress();
  const { state, error } = usePolledState();
  const words = useData("api/words", 0);
  useEffect(() => { document.title = `${address.page} · SQLEnv view`; }, [address.page]);
  const ready = state !== null && words.data !== null;
  return html`
    <header class="bar">
      <p class="brand"><strong>SQLEnv</strong> view</p>
      <nav aria-label="Pages">${PAGES.map(([name, title]) => html`<a key=${name} href=${link(name)}
        aria-current=${address.page === name || (name === "episodes" && address.page === "episode") ? "page" : null}>${title}</a>`)}</nav>
      <p class="facts" role="status">${state && standing(state)}</p>
      <${Theme} />
    </header>
    <main>
      <${Trouble} error=${error ?? words.error} />
      ${!ready && error === null && html`<p class="panel">Reading the episodes.</p>`}
      ${ready && (state.sources.length === 0 ? html`<p class="panel">Nothing to see yet: no run has begun in what was
        given. It will appear here when one does.</p>` : html`<${Page} address=${address} state=${state} words=${words.data} />`)}
    </main>`;
}

function Page({ address, state, words }) {
  const shared = { address, state, words, kinds: words.kinds };
  switch (address.page) {
    case "curves": return html`<${CurvesPage} ...${shared} />`;
    case "episodes": return html`<${EpisodesPage} ...${shared} />`;
    case "episode": return html`<${EpisodePage} key=${address.rest.join("/")} ...${shared} />`;
    case "failures": return html`<${FailuresPage} ...${shared} />`;
    case "compare": return html`<${ComparePage} ...${shared} />`;
    default: return html`<p class="panel">There is no such page. <a href="#/">The curves</a></p>`;
  }
}

// How many episodes there are, and what runs that are being written do.
function standing(state) {
  const live = state.sources.filter((one) => one.step !== null && Date.now() / 1000 - one.written < 60);
  const running = live.map((one) => `${one.name} at step ${one.step}${one.max_steps > 0 ? ` of ${one.max_steps}` : ""}`);
  return [`${count(state.episodes)} episodes`, ...running].join(" · ");
}

function Theme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("sqlenv-theme") ?? "auto");
  const next = () => {
    const chosen = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("sqlenv-theme", chosen);
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    setTheme(chosen);
  };
  return html`<button type="button" class="quiet" id="theme" onClick=${next}>Theme: ${theme}</button>`;
}

render(html`<${View} />`, document.body);
