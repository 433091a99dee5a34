// On small screens, tables become lists. Each cell then shows the header of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.stacked")) {
    const headers = [...table.querySelectorAll("thead th")];
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].slice(1).forEach((cell, i) => {
        if (headers[i + 1]) cell.dataset.header = headers[i + 1].textContent.trim();
      });
    }
  }
});
