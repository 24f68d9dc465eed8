"use strict";
// The completions browser. What a model wrote reaches the page through textContent alone, so it is never markup.
// The filter lives in the address (#step=3&stage=2&reward=1&text=foo): a view can be linked to.

const AT_ONCE = 50;
const KEYS = ["run", "step", "stage", "reward", "text"];
const found = (id) => document.getElementById(id);
const data = JSON.parse(found("completions-data").textContent);
const runName = (run) => `${data.runs[run].method}/${data.runs[run].seed}`;
let numShown = AT_ONCE;
let missing = []; // what the address asked for and this page does not have

for (const row of data.rows) {
  row.values = { run: runName(row.run), step: `${row.step}`, stage: `${row.stage}`, reward: row.reward >= 1 ? "1" : "0" };
  row.searched = [row.text, data.prompts[row.prompt], row.reason].join("\n").toLowerCase();
}

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function fillSelect(key, values, label = (value) => value) {
  for (const value of values) {
    const option = element("option", label(value));
    option.value = value;
    found(`filter-${key}`).append(option);
  }
}

function matching() {
  const chosen = KEYS.slice(0, -1).filter((key) => found(`filter-${key}`).value !== "");
  const text = found("filter-text").value.toLowerCase();
  return data.rows.filter(
    (row) => chosen.every((key) => row.values[key] === found(`filter-${key}`).value) && row.searched.includes(text),
  );
}

function card(row, before) {
  const made = element("article", "", row.reward >= 1 ? "right" : "wrong");
  const reward = `reward ${row.reward === null ? "not a number" : Number(row.reward.toPrecision(4))}`;
  const facts = [`${data.runs[row.run].method}, seed ${data.runs[row.run].seed}`, `step ${row.step}`, `stage ${row.stage}`];
  const marks = [reward, row.reason, row.finished ? "" : "cut off", likelihood(row)];
  made.append(element("p", [...facts, ...marks].filter(Boolean).join(" · "), "caption"));
  const sameGroup = before && before.prompt === row.prompt && before.step === row.step && before.run === row.run;
  if (!sameGroup) made.append(element("pre", data.prompts[row.prompt], "prompt"));
  made.append(element("pre", row.text));
  return made;
}

function likelihood(row) {
  if (row.logprob === null) return "";
  const after = row.logprob_after === null ? "" : ` → ${row.logprob_after.toFixed(2)} after forgetting`;
  return `log p ${row.logprob.toFixed(2)}${after}`;
}

function show() {
  const rows = matching();
  const shown = rows.slice(0, numShown);
  found("completions").replaceChildren(...shown.map((row, place) => card(row, shown[place - 1])));
  found("completions-count").textContent =
    `${shown.length.toLocaleString("en")} shown of ${rows.length.toLocaleString("en")} that match` +
    (missing.length ? ` (not on this page: ${missing.join(", ")})` : "");
  found("completions-more").hidden = shown.length === rows.length;
}

function writeAddress() {
  const filter = new URLSearchParams(KEYS.map((key) => [key, found(`filter-${key}`).value]).filter(([, value]) => value));
  history.replaceState(null, "", `#${filter}`);
}

function readAddress() {
  const filter = new URLSearchParams(location.hash.slice(1));
  missing = [];
  for (const key of KEYS) {
    const control = found(`filter-${key}`);
    control.value = filter.get(key) ?? "";
    if (control.selectedIndex === -1) {
      missing.push(`${key} ${filter.get(key)}`);
      control.value = "";
    }
  }
  numShown = AT_ONCE;
  show();
}

const different = (key) => [...new Set(data.rows.map((row) => row.values[key]))];
fillSelect("run", different("run"), (value) => value.replace(/\/(-?\d+)$/, ", seed $1"));
fillSelect("step", different("step").sort((one, other) => one - other));
fillSelect("stage", different("stage").sort());
for (const key of KEYS) {
  found(`filter-${key}`).addEventListener("input", () => {
    numShown = AT_ONCE;
    missing = [];
    writeAddress();
    show();
  });
}
found("completions-more").addEventListener("click", () => {
  numShown += AT_ONCE;
  show();
});
addEventListener("hashchange", readAddress);
found("completions-browser").hidden = false;
readAddress();
