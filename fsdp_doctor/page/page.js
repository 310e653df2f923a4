"use strict";
// The data of the page, unpacked: what its rows and numbers are is said in page_data.py.
const data = JSON.parse(document.getElementById("data").textContent);
const AXES = ["strategy", "offload", "staging", "direction"];
const SHOWN = { all: "all cases", bad: "only those that fail somewhere", changed: "only those that changed" };
const ANY = "any";
const MOST_ROWS = 300;
const MOST_FOUND = 12;

const outcomes = data.outcomes.map(([kind, ...texts]) => {
  const [reason, message, also, known] = texts.map((number) => data.texts[number]);
  return { kind: data.kinds[kind], reason, message, also, known };
});
const cases = data.cases.map(([strategy, offload, staging, others, direction, path, shown, statements, changed]) => {
  const one = {
    strategy: data.axes.strategy[strategy],
    offload: data.axes.offload[offload],
    staging: data.axes.staging[staging],
    direction: data.axes.direction[direction],
    others: data.texts[others],
    path: data.paths[path],
    outcomes: shown.map((number) => (number < 0 ? null : outcomes[number])),
    statements: statements.map((number) => data.texts[number]),
    changed: Boolean(changed),
  };
  one.scenario = [one.strategy, one.offload, one.staging].filter(Boolean).join("/");
  one.id = [one.scenario, one.others, one.path].filter(Boolean).join("/");
  one.bad = one.outcomes.some((outcome) => outcome && data.bad.includes(outcome.kind));
  return one;
});
const caseById = new Map(cases.map((one) => [one.id, one]));

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

// --- What is chosen, as the address has it.

function choices(axis) {
  if (axis === "device") return [...new Set(data.environments.map((one) => one.device))];
  return data.axes[axis].filter((value) => cases.some((one) => one[axis] === value));
}

function initial() {
  const first = (axis, wanted) => (choices(axis).includes(wanted) ? wanted : choices(axis)[0]);
  return {
    strategy: first("strategy", "fsdp2"), offload: first("offload", "policy"), staging: ANY,
    direction: first("direction", "out"), device: ANY, show: "all", case: "", env: "",
  };
}

function stateOf(hash) {
  const given = Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
  const found = initial();
  const one = caseById.get(given.case);
  if (one) for (const axis of AXES) found[axis] = one[axis];
  for (const axis of [...AXES, "device"]) {
    if (given[axis] === ANY || choices(axis).includes(given[axis])) found[axis] = given[axis];
  }
  if (given.show in SHOWN) found.show = given.show;
  if (one) Object.assign(found, { case: one.id, env: given.env || "" });
  return found;
}

function addressOf(chosen) {
  const first = initial();
  const told = Object.entries(chosen).filter(([key, value]) => value !== first[key]);
  return told.length ? `#${new URLSearchParams(told)}` : location.pathname + location.search;
}

function isAnchor(hash) {
  return hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1))) !== null;
}

let state = stateOf(isAnchor(location.hash) ? "" : location.hash);

function keepInAddress() {
  history.replaceState(null, "", addressOf(state));
}

// --- The matrix.

function chosenCases() {
  return cases.filter((one) =>
    AXES.every((axis) => state[axis] === ANY || one[axis] === state[axis]) &&
    (state.show === "all" || one[state.show]));
}

function chosenColumns() {
  return data.environments.map((one, index) => ({ ...one, index }))
    .filter((one) => state.device === ANY || one.device === state.device);
}

function columnHead(column, rows) {
  const ran = rows.map((one) => one.outcomes[column.index]).filter(Boolean);
  const ok = ran.filter((outcome) => outcome.kind === "ok").length;
  const head = element("th", { scope: "col", title: column.name }, `torch ${column.torch}`, element("small", {}, column.device));
  if (column.more) head.append(element("small", {}, column.more));
  head.append(element("small", {}, `${ok} of ${ran.length} ok`));
  if (column.incomplete) head.append(element("small", { className: "incomplete", title: column.incomplete }, "incomplete"));
  return head;
}

function cell(one, column) {
  const outcome = one.outcomes[column.index];
  const kind = outcome ? outcome.kind : "not run";
  const button = verdict(kind, "button", { type: "button", tabIndex: -1, ariaHasPopup: "dialog" });
  button.ariaLabel = `${kind}: ${one.id}, ${column.name}`;
  button.dataset.case = one.id;
  button.dataset.env = column.anchor;
  return element("td", {}, button);
}

// A long name may go on in the next line after a dot or an underscore.
function breakable(name) {
  return name.split(/(?<=[._+])/).flatMap((piece) => [piece, element("wbr")]);
}

function row(one, columns) {
  const head = element("th", { scope: "row" }, element("code", {}, ...breakable(one.path)));
  if (one.others) head.append(element("small", {}, one.others.replaceAll("/", ", ")));
  return element("tr", {}, head, ...columns.map((column) => cell(one, column)));
}

function table(rows, columns, most) {
  const groups = grouped(rows.slice(0, most));
  const made = element("table", {}, element("caption", {}, "Verdict of each path, by version of torch"));
  const heads = columns.map((column) => columnHead(column, rows));
  made.append(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "path"), ...heads)));
  for (const [scenario, members] of groups) {
    const title = element("th", { scope: "rowgroup", colSpan: columns.length + 1 }, element("span", {}, scenario.replaceAll("/", ", ")));
    made.append(element("tbody", {}, element("tr", {}, title), ...members.map((one) => row(one, columns))));
  }
  return made;
}

function grouped(rows) {
  const groups = new Map();
  for (const one of rows) groups.set(one.scenario, [...(groups.get(one.scenario) || []), one]);
  return groups;
}

function showMatrix(most = MOST_ROWS) {
  const rows = chosenCases();
  const columns = chosenColumns();
  const place = document.getElementById("matrix");
  place.replaceChildren();
  document.getElementById("count").textContent =
    `${rows.length} of ${cases.length} cases, ${columns.length} of ${data.environments.length} environments`;
  if (!rows.length) {
    place.append(element("p", { className: "more" }, "No case is like this; choose “any” somewhere."));
    return;
  }
  place.append(table(rows, columns, most));
  const first = place.querySelector("td button");
  if (first) first.tabIndex = 0;
  if (rows.length > most) {
    const all = element("button", { type: "button", className: "plain more" }, `Show all ${rows.length} cases`);
    all.addEventListener("click", () => showMatrix(rows.length));
    place.append(all);
  }
}

function showFilters() {
  const labels = { strategy: "Strategy", offload: "Offload", staging: "Staging", direction: "Direction", device: "Device", show: "Show" };
  const meaning = { out: "out: extraction", in: "in: loading" };
  const fields = Object.entries(labels).map(([axis, label]) => {
    const options = axis === "show" ? Object.entries(SHOWN) : [ANY, ...choices(axis)].map((value) => [value, meaning[value] || value]);
    const select = element("select", { id: `choose-${axis}` }, ...options.map(([value, text]) => element("option", { value }, text)));
    select.value = state[axis];
    select.addEventListener("change", () => {
      state = { ...state, [axis]: select.value };
      keepInAddress();
      showMatrix();
    });
    return element("label", {}, label, select);
  });
  document.getElementById("filters").replaceChildren(...fields);
}

function move(event) {
  const button = event.target.closest("td button");
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!button || !step) return;
  event.preventDefault();
  const rows = [...button.closest("table").querySelectorAll("tr:has(td)")];
  const at = rows.indexOf(button.closest("tr")) + step[0];
  const place = button.closest("td").cellIndex + step[1];
  const next = rows[at]?.cells[place]?.querySelector("button");
  if (next) focusOn(next);
}

function focusOn(button) {
  for (const other of document.querySelectorAll("#matrix td button[tabindex='0']")) other.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
  button.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- A cell.

function copying(text, label) {
  const button = element("button", { type: "button", className: "plain" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it and copy it";
    }
  });
  return button;
}

function part(title, ...content) {
  return [element("h3", {}, title), ...content];
}

function knownPart(id) {
  const entry = document.getElementById(`entry-${id}`);
  if (!entry) return id ? part("Known failure", element("p", {}, id)) : [];
  const link = element("a", { href: `#entry-${id}` }, entry.querySelector("h3").textContent);
  const said = [...entry.querySelectorAll(":scope > p:not(.facts, .cases), :scope > pre")].map((node) => node.cloneNode(true));
  return part("Known failure", element("p", {}, link), ...said);
}

function sheet(one, column) {
  const outcome = one.outcomes[column.index];
  const command = ["fsdp-doctor probe", column.options, `--case '${one.id}'`].filter(Boolean).join(" ");
  const parts = [element("p", {}, element("code", {}, one.id), element("br"), column.name)];
  const kind = outcome ? outcome.kind : "not run";
  parts.push(element("p", {}, verdict(kind), ` ${meanings.get(kind)}`));
  if (!outcome && column.incomplete) parts.push(element("p", {}, `Its run is incomplete: ${column.incomplete}`));
  if (outcome?.reason) parts.push(...part(data.bad.includes(kind) ? "What happened" : "Reason", element("pre", {}, outcome.reason)));
  if (outcome?.message) parts.push(...part("Message", element("pre", {}, outcome.message)));
  if (outcome?.also) parts.push(...part("Also", element("pre", {}, outcome.also)));
  if (outcome) parts.push(...knownPart(outcome.known));
  if (data.bad.includes(kind) && !outcome.known) parts.push(...part("Known failure", element("p", {}, "The catalogue of known failures does not have it.")));
  if (one.statements.length) parts.push(...part("From version to version", element("ul", {}, ...one.statements.map((text) => element("li", {}, text)))));
  parts.push(...part("Run it", element("pre", {}, element("code", {}, command))));
  parts.push(element("div", { className: "actions" }, copying(command, "Copy the command"), copying(location.href, "Copy a link to this cell")));
  const close = element("button", { type: "button", className: "plain close" }, "Close");
  close.addEventListener("click", () => dialog.close());
  return element("div", { className: "sheet" }, element("h2", { id: "cell-title" }, one.path), close, ...parts);
}

const meanings = new Map([...document.querySelectorAll(".legend dt")].map((term) => [term.textContent, term.nextElementSibling.textContent]));
const dialog = document.getElementById("cell");

function open(id, anchor) {
  const one = caseById.get(id);
  const column = data.environments.map((each, index) => ({ ...each, index })).find((each) => each.anchor === anchor)
    || { ...data.environments[0], index: 0 };
  state = { ...state, case: id, env: column.anchor };
  keepInAddress();
  dialog.replaceChildren(sheet(one, column));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

function closed() {
  const [id, anchor] = [state.case, state.env];
  state = { ...state, case: "", env: "" };
  if (!isAnchor(location.hash)) keepInAddress();
  const button = [...document.querySelectorAll("#matrix td button")].find((each) => each.dataset.case === id && each.dataset.env === anchor);
  if (button && !isAnchor(location.hash)) focusOn(button);
}

// --- The search.

function oneLine(text) {
  return text.replace(/[\u201c\u201d]/g, '"').replace(/[\u2018\u2019`]/g, "'").split(/\s+/).join(" ").trim();
}

function expressions() {
  const made = [];
  for (const [id, patterns] of Object.entries(data.signatures)) {
    for (const pattern of patterns) {
      const text = pattern.replaceAll("<device>", data.device);
      try {
        made.push([id, new RegExp(text.replace("(?i)", ""), text.includes("(?i)") ? "i" : "")]);
      } catch { /* What this browser cannot read is found by its words. */ }
    }
  }
  return made;
}

const signatures = expressions();
const knownIn = new Map();
for (const one of cases) {
  one.outcomes.forEach((outcome, index) => {
    if (outcome?.known) knownIn.set(outcome.known, [...(knownIn.get(outcome.known) || []), [one, index]]);
  });
}
const entries = [...document.querySelectorAll(".entry")].map((node) => {
  const id = node.id.replace(/^entry-/, "");
  const said = (data.signatures[id] || []).join(" ").replaceAll("\\", "");
  return { id, node, title: node.querySelector("h3").textContent, words: `${node.textContent} ${said}`.toLowerCase() };
});

function likeness(words, text) {
  return words.filter((word) => text.includes(word)).length / words.length;
}

function found(query) {
  const line = oneLine(query);
  const words = [...new Set(line.toLowerCase().split(/[^a-z0-9_.]+/).filter((word) => word.length > 2))];
  if (!words.length) return null;
  const sure = new Set(signatures.filter(([, expression]) => expression.test(line)).map(([id]) => id));
  const near = (text) => likeness(words, text);
  const ranked = entries.map((entry) => [sure.has(entry.id) ? 2 : near(entry.words), entry]).filter(([like]) => like >= 0.7);
  const messages = outcomes.filter((outcome) => data.bad.includes(outcome.kind) && near(`${outcome.reason} ${outcome.message}`.toLowerCase()) >= 0.7);
  return {
    entries: ranked.sort(([one], [other]) => other - one).map(([, entry]) => entry),
    messages: [...new Map(messages.map((outcome) => [outcome.kind + outcome.reason, outcome])).values()],
  };
}

function cellLink(one, index, text) {
  const environment = data.environments[index];
  return element("a", { href: `#${new URLSearchParams({ case: one.id, env: environment.anchor })}` }, text || `${one.id}, ${environment.name}`);
}

function firstCell(outcome) {
  const one = cases.find((each) => each.outcomes.includes(outcome));
  return one ? cellLink(one, one.outcomes.indexOf(outcome)) : "";
}

function showFound(query) {
  const place = document.getElementById("results");
  const result = found(query);
  place.replaceChildren();
  if (!result) return;
  const { entries: known, messages } = result;
  if (!known.length && !messages.length) {
    place.append(element("p", {}, "Nothing here has these words. `fsdp-doctor explain` reads the whole log."));
  }
  const kind = (entry) => entry.node.querySelector(".verdict").cloneNode(true);
  const ofEntry = (entry) => element("li", {}, kind(entry), " ", element("a", { href: `#entry-${entry.id}` }, entry.title));
  const ofMessage = (outcome) => element("li", {}, verdict(outcome.kind), " ", firstCell(outcome),
    element("span", { className: "message" }, outcome.reason.slice(0, 300)),
    outcome.known ? element("a", { href: `#entry-${outcome.known}` }, outcome.known) : "");
  for (const [title, all, of] of [["Known failures", known, ofEntry], ["Messages in the matrix", messages, ofMessage]]) {
    if (!all.length) continue;
    const more = all.length > MOST_FOUND ? `, the first ${MOST_FOUND}` : "";
    place.append(element("h3", {}, `${title}: ${all.length}${more}`), element("ol", {}, ...all.slice(0, MOST_FOUND).map(of)));
  }
}

function showWhereKnown() {
  for (const entry of entries) {
    const where = knownIn.get(entry.id) || [];
    if (!where.length) continue;
    const links = where.slice(0, 3).flatMap(([one, index]) => [cellLink(one, index), "; "]).slice(0, -1);
    const more = where.length > 3 ? `; and ${where.length - 3} more` : "";
    entry.node.querySelector(".cases").append(`Seen here in ${where.length} results: `, ...links, more);
  }
}

// --- Together.

function follow() {
  if (isAnchor(location.hash)) {
    if (dialog.open) dialog.close();
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    target.scrollIntoView();
    target.focus({ preventScroll: true });
    return;
  }
  state = stateOf(location.hash);
  showFilters();
  showMatrix();
  if (state.case) open(state.case, state.env);
}

document.getElementById("matrix").addEventListener("click", (event) => {
  const button = event.target.closest("td button");
  if (!button) return;
  focusOn(button);
  open(button.dataset.case, button.dataset.env);
});
document.getElementById("matrix").addEventListener("keydown", move);
document.getElementById("search-form").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("search").addEventListener("input", (event) => showFound(event.target.value));
dialog.addEventListener("close", closed);
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
window.addEventListener("hashchange", follow);
showWhereKnown();
showFilters();
showMatrix();
if (location.hash.length > 1) follow();
