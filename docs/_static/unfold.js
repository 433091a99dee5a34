/* Open the details of the method that the address names. */
function unfold() {
  const name = decodeURIComponent(location.hash.slice(1));
  const details = document.getElementById(name)?.parentElement?.querySelector("details");
  if (details) details.open = true;
}

addEventListener("hashchange", unfold);
addEventListener("DOMContentLoaded", unfold);
