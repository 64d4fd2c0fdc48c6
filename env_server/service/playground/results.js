// From the environment's text to data. Pure: the same text gives the same value, and nothing is lost or made up.
// What cannot be read with certainty is null, and the page then shows the text as it came.
//
// The text is made for a language model (`env_server/display.py`): cells joined by " | ", a header, one line per row,
// a notice at the end. A cell that holds the separator is quoted, but quotes inside are not doubled, and a header is
// not quoted at all, so a line can be cut in more than one way; a table is read only where all lines have one width.

const SEPARATOR = " | ";
const NOTICE = /^(no rows|\(more rows\)|\(1 more row\)|\(\d+ more rows\))$/;
const MORE_COLUMNS = /^… and \d+ more columns?$/;

// Return {columns, rows, notes} of a SAMPLE or QUERY, or null. The cells of a line, joined, are the line.
export function parseResult(text) {
  const lines = text.split("\n");
  const notes = [];
  if (lines.length > 1 && NOTICE.test(lines.at(-1))) notes.push(lines.pop());
  for (const header of [splitExpressions(lines[0]), lines[0].split(SEPARATOR)]) {
    const columns = [...header];
    const note = MORE_COLUMNS.test(columns.at(-1)) && columns.length > 1 ? columns.pop() : null;
    const rows = lines.slice(1).map((line) => rowOfWidth(line, columns.length));
    if (rows.every((row) => row !== null)) return { columns, rows, notes: note === null ? notes : [...notes, note] };
  }
  return null;
}

// Return {table, kind, count, columns: [{name, type, key}], note} of a DESCRIBE, or null.
export function parseDescription(text) {
  const [first, ...rest] = text.split("\n");
  const head = /^(.+?)( \(view\))?: (\d+ rows?|unknown number of rows)$/.exec(first);
  if (head === null) return null;
  const note = rest.length > 0 && MORE_COLUMNS.test(rest.at(-1)) ? rest.pop() : "";
  const columns = rest.map(parseColumn);
  if (columns.includes(null)) return null;
  return { table: unquoted(head[1]), kind: head[2] ? "view" : "table", count: head[3], columns, note };
}

// Return the tables' names and the descriptions that `schema_info` has gathered.
export function parseSchema(text) {
  const [names, ...described] = text.split("\n\n");
  return {
    names: names.replace(/^Tables: /, "").split(", ").filter((name) => name !== ""),
    described: described.map(parseDescription).filter((table) => table !== null),
  };
}

// Whether a cell is a number, and is set flush right.
export function isNumber(cell) {
  return /^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(cell);
}

function parseColumn(line) {
  const match = /^("(?:[^"]|"")*"|\S+)(?: (.*))?$/.exec(line);
  if (match === null) return null;
  const parts = /^(.*?)((?:^| )primary key)?((?:^| )references .+)?$/.exec(match[2] ?? "");
  const key = [parts[2], parts[3]].filter(Boolean).map((part) => part.trim()).join(", ");
  return { name: match[1], type: parts[1], key };
}

function unquoted(name) {
  return /^".*"$/.test(name) ? name.slice(1, -1).replaceAll('""', '"') : name;
}

function rowOfWidth(line, width) {
  if (width === 1) return [line];
  for (const cells of [splitValues(line), line.split(SEPARATOR)]) if (cells.length === width) return cells;
  return null;
}

// A header may be an expression, such as first || ' | ' || last: a separator inside quotes does not part it.
function splitExpressions(line) {
  return joined(line.split(SEPARATOR), (name) => [...name].filter((char) => char === "'").length % 2 === 1);
}

// A value that begins with a quote goes on to the next part that ends with one.
function splitValues(line) {
  const isOpen = (cell) => cell.startsWith("'") && (cell.length === 1 || !cell.endsWith("'"));
  return joined(line.split(SEPARATOR), isOpen);
}

// Join a part to those before it while they are open; parts that are never closed stay apart.
function joined(parts, isOpen) {
  const cells = [];
  for (let start = 0; start < parts.length; ) {
    let end = start + 1;
    while (end < parts.length && isOpen(parts.slice(start, end).join(SEPARATOR))) end += 1;
    if (isOpen(parts.slice(start, end).join(SEPARATOR))) end = start + 1;
    cells.push(parts.slice(start, end).join(SEPARATOR));
    start = end;
  }
  return cells;
}
