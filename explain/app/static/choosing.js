// What to ask: methods, another answer, the layer.

class MethodChoice {
  constructor(change) {
    this.change = change;
    this.chosen = ['gradcam'];
    this.boxes = new Map();
    this.titles = new Map();
    this.list = el('div', { class: 'method-list' });
    this.summary = el('summary', {}, 'Methods: Grad-CAM');
    this.element = el('details', { class: 'choice' }, this.summary, this.list);
  }

  title(name) {
    return this.titles.get(name) ?? name;
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
    this.titles.set(method.name, method.title);
    const cost = method.passes === null ? '' : `${Math.round(method.passes)}×`;
    return el('label', { title: `${method.about}${method.paper ? ` (${method.paper})` : ''}` }, input, el('span', {}, method.title),
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
    this.summary.textContent = `Methods: ${this.chosen.map((name) => this.title(name)).join(', ')}`;
  }
}

// A search in the labels: type a part of one, and pick from what fits. An image-text model takes any other text too.
class LabelSearch {
  constructor(pick) {
    this.pick = pick;
    this.labels = [];
    const id = newId('search');
    this.input = el('input', { type: 'search', id, placeholder: 'any label', autocomplete: 'off', oninput: () => this.find(), onkeydown: (event) => this.key(event) });
    this.found = el('ul', { class: 'found', hidden: true, 'aria-label': 'Labels that fit' });
    this.name = el('label', { for: id });
    this.element = el('div', { class: 'label-search' }, this.name, this.input, this.found);
  }

  fill({ labels, texts }) {
    this.labels = labels.map((label, number) => [label, number]);
    this.texts = texts;
    this.name.textContent = texts ? 'Explain a text' : 'Explain another class';
    this.input.placeholder = texts ? 'a photo of …' : labels.length ? `any of ${labels.length} labels` : 'number of the class';
  }

  matches() {
    const typed = this.input.value.trim();
    const found = typed ? this.matchingLabels(typed.toLowerCase()) : [];
    return this.texts && typed ? [[typed, typed], ...found] : found;
  }

  matchingLabels(text) {
    if (!this.labels.length) return /^\d+$/.test(text) ? [[`class ${text}`, Number(text)]] : [];
    const starts = ([label]) => (label.toLowerCase().startsWith(text) ? 0 : label.toLowerCase().includes(` ${text}`) ? 1 : 2);
    return this.labels.filter(([label, number]) => label.toLowerCase().includes(text) || String(number) === text)
      .sort((one, other) => starts(one) - starts(other) || one[1] - other[1]).slice(0, 8);
  }

  find() {
    const found = this.matches();
    this.found.replaceChildren(...found.map(([label, number]) =>
      el('li', {}, el('button', { type: 'button', onclick: () => this.take(number) }, el('span', {}, label), el('small', {}, typeof number === 'string' ? 'this text' : String(number))))));
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
    this.field.fill([[null, [['', usual ? `default (${usual})` : 'default']]], ['Layers with maps', layers.map(([name, , size]) => [name, `${name} – ${size}`])]]);
    this.field.take(layers.some(([name]) => name === before) ? before : '');
  }

  get value() {
    return this.field.select.value || null;
  }
}
