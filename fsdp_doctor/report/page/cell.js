// One case in one environment, opened.

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
  const parts = [element("p", {}, element("code", {}, one.id), element("br"), column.name, element("br"), element("small", {}, column.packages))];
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
  return element("div", { className: "sheet" }, element("h2", { id: "cell-title" }, one.method), close, ...parts);
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
