// What is chosen: strategy, offload and the others, and the open cell. The address has it, so that it can be shared.

function choices(axis) {
  if (axis === "device") return [...new Set(data.environments.map((one) => one.device))].filter((device) => device !== data.nowhere);
  return data.axes[axis].filter((value) => value && cases.some((one) => one[axis] === value));
}

// After a choice, what was chosen before and leaves no case beside it is let go of.
function choose(axis, value) {
  state = { ...state, [axis]: value };
  for (const other of AXES) {
    const left = cases.some((one) => [axis, other].every((each) => state[each] === ANY || one[each] === state[each]));
    if (other !== axis && AXES.includes(axis) && !left) state[other] = ANY;
  }
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
  if (one) for (const axis of AXES) found[axis] = one[axis] || ANY;
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
  return hash.length > 1 && document.getElementById(hash.slice(1)) !== null;
}

let state = stateOf(isAnchor(location.hash) ? "" : location.hash);

function keepInAddress() {
  history.replaceState(null, "", addressOf(state));
}
