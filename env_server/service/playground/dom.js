// Building the page. Whatever comes from a database or an agent goes in as text; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// Return an element with attributes and children; a string child is a text node.
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, onClick, attributes = {}) {
  const element = el("button", { type: "button", ...attributes }, label);
  element.addEventListener("click", onClick);
  return element;
}

export function counted(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

// Whether keys that are typed here belong to the element and are no shortcuts.
export function takesText(element) {
  return element.matches("textarea, select, input:not([type=checkbox])");
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
