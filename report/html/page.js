"use strict";
// Tables of class "data": a click on a heading sorts, fields below the headings filter. Without scripts they stay readable.

// Values of a column that are offered as a list; a column with more has a text field.
const MOST_CHOICES = { words: 12, numbers: 6 };

/** Number of a cell, or its text; null where the cell is "-" or empty. */
function valueOf(cell) {
  if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
  const text = cell.textContent.trim();
  return text === "-" || text === "" ? null : text;
}

/** Order of two values: numbers by size, texts by language rules with their digits as numbers, missing ones last. */
function compare(one, other, direction) {
  if (one === null || other === null) return (one === null) - (other === null);
  const order = typeof one === "number" && typeof other === "number"
    ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return direction * order;
}

/** Test of a cell for what was typed: all words, or "> 5", "<= 0.1", "5" where cells are numbers. */
function matcher(typed, numbers) {
  const limit = /^([<>]=?|=)?\s*(-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?)$/i.exec(typed.trim());
  if (numbers && limit) {
    const number = Number(limit[2].replaceAll(",", ""));
    const tests = { "<": (x) => x < number, "<=": (x) => x <= number, ">": (x) => x > number, ">=": (x) => x >= number };
    const test = tests[limit[1]] ?? ((x) => x === number);
    return (cell) => cell.dataset.v !== undefined && test(Number(cell.dataset.v));
  }
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  return (cell) => words.every((word) => cell.textContent.toLowerCase().includes(word));
}

function field(rows, column, head, numbers) {
  const texts = [...new Set(rows.map((row) => row.cells[column].textContent))];
  const listed = texts.length <= (numbers ? MOST_CHOICES.numbers : MOST_CHOICES.words);
  const element = document.createElement(listed ? "select" : "input");
  if (listed) {
    texts.sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    for (const text of ["", ...texts.filter(Boolean)]) element.add(new Option(text || "all", text));
  } else {
    element.type = "search";
    element.placeholder = "filter";
  }
  element.setAttribute("aria-label", `filter ${head}`);
  return element;
}

function enable(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent);
  const numbers = heads.map((head) => head.classList.contains("n"));
  const fields = heads.map((_, column) => field(rows, column, names[column], numbers[column]));

  const count = document.createElement("p");
  count.className = "count";
  const words = document.createElement("span");
  words.setAttribute("role", "status");
  const reset = document.createElement("button");
  reset.type = "button";
  reset.textContent = "clear filters";
  count.append(words, reset);
  table.parentElement.before(count);

  function filter() {
    const tests = [];
    fields.forEach((element, column) => {
      if (element.value.trim() === "") return;
      const exact = element.tagName === "SELECT";
      const test = exact ? (cell) => cell.textContent === element.value : matcher(element.value, numbers[column]);
      tests.push((row) => test(row.cells[column]));
    });
    let shown = 0;
    for (const row of rows) {
      row.hidden = !tests.every((test) => test(row));
      shown += !row.hidden;
    }
    words.textContent = `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} lines`;
    reset.hidden = tests.length === 0;
  }

  function sort(column) {
    const ascending = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const keyed = rows.map((row) => [valueOf(row.cells[column]), row]);
    keyed.sort((one, other) => compare(one[0], other[0], ascending ? 1 : -1));
    body.append(...keyed.map(([, row]) => row));
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = names[column];
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });
  const line = table.tHead.insertRow();
  line.className = "filters";
  for (const element of fields) {
    element.addEventListener("input", filter);
    const cell = document.createElement("th");
    cell.append(element);
    line.append(cell);
  }
  reset.addEventListener("click", () => {
    fields.forEach((element) => { element.value = ""; });
    filter();
  });
  filter();
}

document.querySelectorAll("table.data").forEach(enable);
