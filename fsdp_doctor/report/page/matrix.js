// The matrix: methods down, environments across, and the fields that choose what it shows.

function chosenCases() {
  return cases.filter((one) =>
    AXES.every((axis) => state[axis] === ANY || one[axis] === state[axis]) &&
    (state.show === "all" || one[state.show]));
}

function chosenColumns() {
  return data.environments.map((one, index) => ({ ...one, index }))
    .filter((one) => state.device === ANY || one.device === state.device);
}

// The results that say whether a case works: none of those that could not be built or measured.
function answers(column, rows) {
  return rows.map((one) => one.outcomes[column.index]).filter((outcome) => outcome && [...data.good, ...data.bad].includes(outcome.kind));
}

function columnHead(column, rows) {
  const ran = answers(column, rows);
  const good = ran.filter((outcome) => data.good.includes(outcome.kind)).length;
  const head = element("th", { scope: "col", title: column.name }, `torch ${column.torch}`, element("small", {}, column.device));
  if (column.more) head.append(element("small", {}, column.more));
  head.append(element("small", {}, ran.length ? `${good} of ${ran.length} good` : "no result"));
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
  const head = element("th", { scope: "row" }, element("code", {}, ...breakable(one.method)));
  if (one.others) head.append(element("small", {}, one.others.replaceAll("/", ", ")));
  return element("tr", {}, head, ...columns.map((column) => cell(one, column)));
}

function table(rows, columns, most) {
  const groups = grouped(rows.slice(0, most));
  const made = element("table", {}, element("caption", {}, "Verdict of each method, by version of torch"));
  const heads = columns.map((column) => columnHead(column, rows));
  made.append(element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "method"), ...heads)));
  for (const [scenario, members] of groups) {
    const title = element("th", { scope: "rowgroup", colSpan: columns.length + 1 }, element("span", {}, scenario.replaceAll("/", ", ")));
    made.append(element("tbody", {}, element("tr", {}, title), ...members.map((one) => row(one, columns))));
  }
  return made;
}

function grouped(rows) {
  const groups = new Map();
  for (const one of rows) addTo(groups, one.scenario, one);
  return groups;
}

function showMatrix(most = MOST_ROWS) {
  const rows = chosenCases();
  const chosen = chosenColumns();
  // A report of only the CPU may have no answer to any of these cases; its columns are shown then.
  const answering = chosen.filter((column) => answers(column, rows).length);
  const columns = answering.length ? answering : chosen.filter((column) => rows.some((one) => one.outcomes[column.index]));
  const without = chosen.length - columns.length;
  const place = document.getElementById("matrix");
  place.replaceChildren();
  document.getElementById("count").textContent =
    `${rows.length} of ${cases.length} cases, ${columns.length} of ${data.environments.length} environments`
    + (rows.length && without ? `; ${without} more have no result of these cases` : "");
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
      choose(axis, select.value);
      for (const other of AXES) document.getElementById(`choose-${other}`).value = state[other];
      keepInAddress();
      showMatrix();
    });
    return element("div", {}, element("label", { htmlFor: select.id }, label), select);
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
