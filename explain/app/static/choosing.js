// What to ask: methods, another answer, the layer.

class MethodChoice {
  constructor(change) {
    this.change = change;
    this.chosen = ['gradcam'];
    this.boxes = new Map();
    this.list = el('div', { class: 'method-list' });
    this.summary = el('summary', {}, 'Methods: gradcam');
    this.element = el('details', { class: 'choice' }, this.summary, this.list);
  }

  fill(methods, most) {
    const families = new Map();
    methods.forEach((method) => families.set(method.family, [...(families.get(method.family) ?? []), method]));
    this.boxes.clear();
    this.seconds = slider('Slow methods may take', { min: 5, max: most, step: 5, unit: ' s' }, (seconds) => this.seconds.take(seconds));
    this.seconds.take(20);
    this.seconds.input.addEventListener('change', () => this.change());
    this.list.replaceChildren(this.seconds, ...this.sorted(families).map(([family, own]) => el('fieldset', {}, el('legend', {}, family), own.map((method) => this.box(method)))));
    this.chosen = this.chosen.filter((name) => this.boxes.has(name));
    if (!this.chosen.length) this.chosen = [methods.find((method) => method.quick)?.name ?? methods[0].name];
    this.show();
  }

  // The family of what is chosen first, and then those with the fewest slow methods.
  sorted(families) {
    const rank = (own) => (own.some(({ name }) => this.chosen.includes(name)) ? -1 : own.filter(({ quick }) => !quick).length / own.length);
    return [...families].sort(([, one], [, other]) => rank(one) - rank(other));
  }

  box(method) {
    const input = el('input', { type: 'checkbox', value: method.name, onchange: () => this.toggle(method.name) });
    this.boxes.set(method.name, input);
    const cost = method.passes === null ? '' : `${Math.round(method.passes)}×`;
    return el('label', { title: `${method.about}${method.paper ? ` (${method.paper})` : ''}` }, input, el('span', {}, method.name),
      el('small', { class: method.quick ? 'quick' : 'slow', title: 'passes of the model' }, method.quick ? cost : [cost, 'slow'].filter(Boolean).join(', ')));
  }

  toggle(name) {
    this.chosen = this.chosen.includes(name) ? this.chosen.filter((each) => each !== name) : [...this.chosen, name];
    if (!this.chosen.length) this.chosen = [name];
    this.show();
    this.change();
  }

  show() {
    this.boxes.forEach((input, name) => { input.checked = this.chosen.includes(name); });
    this.summary.textContent = `Methods: ${this.chosen.join(', ')}`;
  }
}

// A search in the labels: type a part of one, and pick from what fits.
class LabelSearch {
  constructor(pick) {
    this.pick = pick;
    this.labels = [];
    const id = newId('search');
    this.input = el('input', { type: 'search', id, placeholder: 'any label', autocomplete: 'off', oninput: () => this.find(), onkeydown: (event) => this.key(event) });
    this.found = el('ul', { class: 'found', hidden: true, 'aria-label': 'Labels that fit' });
    this.element = el('div', { class: 'label-search' }, el('label', { for: id }, 'Explain another answer'), this.input, this.found);
  }

  fill(labels) {
    this.labels = labels.map((label, number) => [label, number]);
    this.input.placeholder = labels.length ? `any of ${labels.length} labels` : 'number of the class';
  }

  matches() {
    const text = this.input.value.trim().toLowerCase();
    if (!text) return [];
    if (!this.labels.length) return /^\d+$/.test(text) ? [[`class ${text}`, Number(text)]] : [];
    const starts = ([label]) => (label.toLowerCase().startsWith(text) ? 0 : label.toLowerCase().includes(` ${text}`) ? 1 : 2);
    return this.labels.filter(([label, number]) => label.toLowerCase().includes(text) || String(number) === text)
      .sort((one, other) => starts(one) - starts(other) || one[1] - other[1]).slice(0, 8);
  }

  find() {
    const found = this.matches();
    this.found.replaceChildren(...found.map(([label, number]) =>
      el('li', {}, el('button', { type: 'button', onclick: () => this.take(number) }, el('span', {}, label), el('small', {}, String(number))))));
    if (!found.length && this.input.value.trim()) this.found.replaceChildren(el('li', { class: 'hint' }, 'No label contains this text.'));
    this.found.hidden = !this.input.value.trim();
  }

  key(event) {
    if (event.key === 'Escape') this.close();
    if (event.key !== 'Enter') return;
    const [first] = this.matches();
    if (first) this.take(first[1]);
  }

  take(number) {
    this.close();
    this.pick(number);
  }

  close() {
    this.input.value = '';
    this.found.hidden = true;
  }
}

class LayerChoice {
  constructor(change) {
    this.field = selection('Layer', change);
    this.element = this.field;
    this.fill({ default: null, layers: [] });
  }

  fill({ default: usual, layers }) {
    const before = this.value;
    this.field.fill([[null, [['', usual ? `the usual one (${usual})` : 'the usual one']]], ['Layers with maps', layers.map(([name, , size]) => [name, `${name} – ${size}`])]]);
    this.field.take(layers.some(([name]) => name === before) ? before : '');
  }

  get value() {
    return this.field.select.value || null;
  }
}
