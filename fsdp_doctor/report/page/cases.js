"use strict";
// The data of the page, unpacked; compat_page.py says what its rows and numbers are.

const data = JSON.parse(document.getElementById("data").textContent);
const AXES = ["strategy", "offload", "staging", "direction"];
const SHOWN = { all: "all cases", bad: "failing cases", changed: "changed cases" };
const ANY = "any";
const MOST_ROWS = 300;
const MOST_FOUND = 12;

const outcomes = data.outcomes.map(([kind, ...texts]) => {
  const [reason, message, also, known] = texts.map((number) => data.texts[number]);
  return { kind: data.kinds[kind], reason, message, also, known };
});
const cases = data.cases.map(([strategy, offload, staging, others, direction, method, shown, statements, changed]) => {
  const one = {
    strategy: data.axes.strategy[strategy],
    offload: data.axes.offload[offload],
    staging: data.axes.staging[staging],
    direction: data.axes.direction[direction],
    others: data.texts[others],
    method: data.methods[method],
    outcomes: shown.map((number) => (number < 0 ? null : outcomes[number])),
    statements: statements.map((number) => data.texts[number]),
    changed: Boolean(changed),
  };
  one.scenario = [one.strategy, one.offload, one.staging].filter(Boolean).join("/");
  one.id = [one.scenario, one.others, one.method].filter(Boolean).join("/");
  one.bad = one.outcomes.some((outcome) => outcome && data.bad.includes(outcome.kind));
  return one;
});
const caseById = new Map(cases.map((one) => [one.id, one]));

function addTo(lists, key, value) {
  if (!lists.has(key)) lists.set(key, []);
  lists.get(key).push(value);
}

function element(name, properties, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function verdict(kind, name = "span", properties = {}) {
  return element(name, { ...properties, className: `verdict ${kind === "not run" ? "none" : kind}` }, kind);
}
