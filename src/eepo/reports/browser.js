"use strict";
// The completions browser. Model output is only ever set as textContent, so it is never markup.
// The filter is stored in the address (#step=3&stage=2&reward=1&text=foo), so a view can be linked.

const PAGE_SIZE = 50;
const KEYS = ["run", "step", "stage", "reward", "text"];
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("completions-data").textContent);
const runName = (run) => `${data.runs[run].method}/${data.runs[run].seed}`;
let numShown = PAGE_SIZE;
let unknownFilters = []; // values in the address that this page does not have

for (const row of data.rows) {
  row.values = {
    run: runName(row.run),
    step: `${row.step}`,
    stage: `${row.stage}`,
    reward: row.reward >= 1 ? "1" : "0",
  };
  row.searchText = [row.text, data.prompts[row.prompt], row.reason].join("\n").toLowerCase();
}

function createElement(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = className;
  return element;
}

function fillSelect(key, values, label = (value) => value) {
  for (const value of values) {
    const option = createElement("option", label(value));
    option.value = value;
    byId(`filter-${key}`).append(option);
  }
}

function matchingRows() {
  const chosen = KEYS.slice(0, -1).filter((key) => byId(`filter-${key}`).value !== "");
  const text = byId("filter-text").value.toLowerCase();
  return data.rows.filter(
    (row) =>
      chosen.every((key) => row.values[key] === byId(`filter-${key}`).value) &&
      row.searchText.includes(text),
  );
}

function createArticle(row, previous) {
  const { method, seed } = data.runs[row.run];
  const facts = [
    `${method}, seed ${seed}`,
    `step ${row.step}`,
    `stage ${row.stage}`,
    `reward ${row.reward === null ? "not a number" : Number(row.reward.toPrecision(4))}`,
    row.reason,
    row.finished ? "" : "cut off",
    logprobText(row),
  ];
  const article = createElement("article", "", row.reward >= 1 ? "correct" : "wrong");
  article.append(createElement("p", facts.filter(Boolean).join(" · "), "caption"));
  const isSameGroup =
    previous &&
    previous.prompt === row.prompt &&
    previous.step === row.step &&
    previous.run === row.run;
  if (!isSameGroup) article.append(createElement("pre", data.prompts[row.prompt], "prompt"));
  article.append(createElement("pre", row.text));
  return article;
}

function logprobText(row) {
  if (row.logprob === null) return "";
  const before = `log p ${row.logprob.toFixed(2)}`;
  if (row.logprob_after === null) return before;
  return `${before} → ${row.logprob_after.toFixed(2)} after unlearning`;
}

function showRows() {
  const rows = matchingRows();
  const shown = rows.slice(0, numShown);
  const articles = shown.map((row, index) => createArticle(row, shown[index - 1]));
  byId("completions").replaceChildren(...articles);
  byId("completions-count").textContent =
    `${shown.length.toLocaleString("en")} shown of ${rows.length.toLocaleString("en")} matching` +
    (unknownFilters.length ? ` (not on this page: ${unknownFilters.join(", ")})` : "");
  byId("completions-more").hidden = shown.length === rows.length;
}

function writeAddress() {
  const values = KEYS.map((key) => [key, byId(`filter-${key}`).value]);
  const filter = new URLSearchParams(values.filter(([, value]) => value));
  history.replaceState(null, "", `#${filter}`);
}

function readAddress() {
  const filter = new URLSearchParams(location.hash.slice(1));
  unknownFilters = [];
  for (const key of KEYS) {
    const control = byId(`filter-${key}`);
    control.value = filter.get(key) ?? "";
    if (control.selectedIndex === -1) {
      unknownFilters.push(`${key} ${filter.get(key)}`);
      control.value = "";
    }
  }
  numShown = PAGE_SIZE;
  showRows();
}

const distinctValues = (key) => [...new Set(data.rows.map((row) => row.values[key]))];
fillSelect("run", distinctValues("run"), (name) => name.replace(/\/(-?\d+)$/, ", seed $1"));
fillSelect("step", distinctValues("step").sort((a, b) => a - b));
fillSelect("stage", distinctValues("stage").sort());
for (const key of KEYS) {
  byId(`filter-${key}`).addEventListener("input", () => {
    numShown = PAGE_SIZE;
    unknownFilters = [];
    writeAddress();
    showRows();
  });
}
byId("completions-more").addEventListener("click", () => {
  numShown += PAGE_SIZE;
  showRows();
});
addEventListener("hashchange", readAddress);
byId("completions-browser").hidden = false;
readAddress();
