// Runs before the page is drawn, so that a chosen theme does not flash. `app.js` changes it.
const chosen = localStorage.getItem("sqlenv-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
