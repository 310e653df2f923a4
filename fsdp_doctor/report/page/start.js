// What follows from an address, a click and a key; and the first view.

function follow() {
  if (isAnchor(location.hash)) {
    if (dialog.open) dialog.close();
    const target = document.getElementById(location.hash.slice(1));
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
