'use strict';
// Small helpers for elements. Texts only ever become text nodes: nothing in them can be markup.

const SVG = 'http://www.w3.org/2000/svg';

function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value' || name === 'checked' || name === 'disabled') element[name] = value;
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

let lastId = 0;
const newId = (word) => `${word}-${++lastId}`;

// A row of choices of which one is taken: radio buttons that look like one control.
function choices(legend, options, onchange, className = 'segments') {
  const name = newId('choice');
  const inputs = options.map(([value, text, hint]) => {
    const input = el('input', { type: 'radio', name, value, onchange: () => onchange(value) });
    return [input, el('label', { title: hint }, input, el('span', {}, text))];
  });
  const field = el('fieldset', { class: className }, el('legend', {}, legend), el('div', {}, inputs.map(([, label]) => label)));
  field.take = (value) => inputs.forEach(([input]) => { input.checked = input.value === String(value); });
  return field;
}

function slider(text, { min = 0, max = 100, step = 1, unit = '\u00a0%', words = (value) => `${value}${unit}` }, oninput) {
  const id = newId('slider');
  const output = el('output', { for: id });
  const input = el('input', { type: 'range', id, min, max, step, oninput: () => oninput(Number(input.value)) });
  const field = el('div', { class: 'slider' }, el('label', { for: id }, text), output, input);
  field.input = input;
  field.take = (value) => {
    input.value = value;
    input.style.setProperty('--filled', `${(100 * (value - min)) / (max - min)}%`);
    output.textContent = words(value);
    input.setAttribute('aria-valuetext', words(value));
  };
  return field;
}

function selection(text, onchange) {
  const id = newId('select');
  const select = el('select', { id, onchange: () => onchange(select.value) });
  const field = el('div', { class: 'selection' }, el('label', { for: id }, text), select);
  field.select = select;
  field.fill = (groups) => {
    select.replaceChildren(...groups.map(([label, options]) => {
      const inside = options.map(([value, name]) => el('option', { value }, name));
      return label === null ? inside : el('optgroup', { label }, inside);
    }).flat());
  };
  field.take = (value) => { select.value = String(value); };
  return field;
}

// A table that scrolls sideways on narrow screens, where the keyboard reaches it too.
function table(caption, head, rows) {
  return el('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': caption },
    el('table', {},
      el('caption', {}, caption),
      el('thead', {}, el('tr', {}, head.map((text) => el('th', { scope: 'col' }, text)))),
      el('tbody', {}, rows.map((row) => el('tr', { 'aria-current': row.current ? 'true' : null }, row.cells.map((cell, i) =>
        (i ? el('td', { class: typeof cell === 'string' && /^[<≈−-]?\d/.test(cell) ? 'number' : null }, cell)
          : el('th', { scope: 'row' }, cell))))))));
}

function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return '–';
  const value = 100 * share;
  if (value >= 9.95 || value === 0) return `${value.toFixed(0)}\u00a0%`;
  return value >= 0.1 ? `${value.toFixed(1)}\u00a0%` : '<0.1\u00a0%';
}

// A probability or a number as people read it: in words where there are some, else in percent.
function amountOf({ probability, amount }) {
  return amount || (probability === null ? '' : percent(probability));
}

function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  return size < 1e-3 || size >= 1e5 ? value.toExponential(2) : value.toPrecision(3).replace('-', '−');
}

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);

// Work that a burst of events asks for is done once, with the next picture.
function once(work) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; work(); });
  };
}
