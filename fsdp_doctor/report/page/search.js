// From an error message to known failures and to the cases that showed it.

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
    if (outcome?.known) addTo(knownIn, outcome.known, [one, index]);
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
