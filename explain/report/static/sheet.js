// Many photos: filtered, sorted, and opened one at a time.

const SORTS = [['number', 'Order of the photos'], ['name', 'Name'], ['label', 'Prediction'], ['probability', 'Probability']];

class Sheet {
  constructor(source, colors, { state, keep, open }) {
    this.source = source;
    this.colors = colors;
    this.state = state;
    this.keep = keep;
    this.open = open;
    const { photos } = source.index;
    this.photos = photos.map((photo, number) => ({ ...photo, number }));
    const change = (patch) => { Object.assign(this.state, patch); this.draw(); };
    this.search = el('input', { type: 'search', id: 'search', placeholder: 'name or class', oninput: () => change({ find: this.search.value }) });
    this.label = selection('Prediction', (label) => change({ label }));
    this.right = selection('Right or wrong', (right) => change({ right }));
    this.passed = selection('Map check', (passed) => change({ passed }));
    this.sort = selection('Sort by', (sort) => change({ sort, least: '', most: '' }));
    this.ends = ['least', 'most'].map((end) => bound(end === 'least' ? 'From' : 'To', (value) => change({ [end]: value })));
    this.range = el('div', { class: 'pair' }, this.ends);
    this.down = el('button', { type: 'button', class: 'plain-button', onclick: () => change({ down: !this.state.down }) });
    this.count = el('p', { role: 'status', class: 'hint' });
    this.grid = el('ul', { class: 'grid' });
    this.fillSelections();
    this.cards = new Map();
    this.watch = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => this.load(entry.target)), { rootMargin: '300px' });
    this.element = el('div', { class: 'sheet' }, el('div', { class: 'heading' }, el('h1', {}, source.index.title ?? 'Photos')),
      el('form', { class: 'filters', role: 'search', onsubmit: (event) => event.preventDefault() },
        el('div', { class: 'selection' }, el('label', { for: 'search' }, 'Find'), this.search), this.label, this.right, this.passed,
        this.sort, this.range, this.down),
      this.count, this.grid);
    this.draw();
  }

  fillSelections() {
    const labels = [...new Set(this.photos.map((photo) => photo.label))].sort();
    this.label.fill([[null, [['', 'all'], ...labels.map((label) => [label, label])]]]);
    const mistakes = this.photos.flatMap((photo) => (photo.mistakes ?? []).map(([mistake]) => mistake)).sort();
    const kinds = [...new Set(mistakes)].map((kind) => [kind, `${kind} (${mistakes.filter((mistake) => mistake === kind).length})`]);
    this.right.fill([[null, [['', 'both'], ['right', '✓ right'], ['wrong', '✗ wrong'], ...kinds]]]);
    this.right.hidden = !this.photos.some((photo) => photo.truth !== undefined);
    this.passed.fill([[null, [['', 'all'], ...['✓', '?', '✗'].map((mark) => [mark, `${mark} covering`])]]]);
    this.passed.hidden = !this.photos.some((photo) => photo.check);
    const figures = new Set();
    this.photos.forEach((photo) => Object.entries(photo.figures ?? {}).forEach(([method, values]) =>
      Object.keys(values).forEach((metric) => figures.add(`${metric} of ${method}`))));
    this.sort.fill([[null, [...SORTS, ...[...figures].map((name) => [name, name])]]]);
  }

  value(photo) {
    const { sort } = this.state;
    if (sort in photo || SORTS.some(([name]) => name === sort)) return photo[sort] ?? null;
    const [metric, method] = sort.split(' of ');
    return photo.figures?.[method]?.[metric] ?? null;
  }

  // Whether what is sorted by lies within the bounds; probabilities are bounded in percent.
  inside(photo) {
    const { sort, least, most } = this.state;
    if (least === '' && most === '') return true;
    const value = this.value(photo);
    if (typeof value !== 'number') return false;
    const scaled = sort === 'probability' ? 100 * value : value;
    return (least === '' || scaled >= Number(least)) && (most === '' || scaled <= Number(most));
  }

  get isOfNumbers() {
    const { sort } = this.state;
    return sort === 'probability' || sort.includes(' of ');
  }

  chosen() {
    const { find, label, right, passed, down } = this.state;
    const wanted = find.trim().toLowerCase();
    const kept = this.photos.filter((photo) =>
      (!wanted || `${photo.name} ${photo.label} ${photo.truth ?? ''}`.toLowerCase().includes(wanted))
      && (!label || photo.label === label)
      && (!right || ['wrong', 'right'][Number(photo.right)] === right || (photo.mistakes ?? []).some(([mistake]) => mistake === right))
      && (!passed || photo.check?.figures.covering.mark === passed)
      && this.inside(photo));
    const order = (one, other) => (typeof one === 'string' ? one.localeCompare(other) : Number(one) - Number(other));
    return kept.sort((a, b) => {
      const [one, other] = [this.value(a), this.value(b)];
      if (one === null || other === null) return (one === null) - (other === null);
      return (down ? -1 : 1) * order(one, other) || a.number - b.number;
    });
  }

  draw() {
    const { state } = this;
    this.search.value = state.find;
    this.label.take(state.label);
    this.right.take(state.right);
    this.passed.take(state.passed);
    this.sort.take(state.sort);
    this.range.hidden = !this.isOfNumbers;
    this.ends.forEach((field, i) => field.take(i ? state.most : state.least, state.sort === 'probability' ? '%' : ''));
    this.down.textContent = state.down ? '↓ falling' : '↑ rising';
    this.down.setAttribute('aria-label', state.down ? 'Order: falling; press for rising' : 'Order: rising; press for falling');
    const chosen = this.chosen();
    this.grid.replaceChildren(...chosen.map((photo) => this.card(photo)));
    const known = chosen.filter((photo) => photo.right !== undefined);
    const right = known.filter((photo) => photo.right).length;
    const all = this.photos.length;
    this.count.textContent = `${chosen.length === all ? `${all} photos` : `${chosen.length} of ${all} photos`}${known.length ? `; right: ${right} of ${known.length}${known.length < 5 ? '' : ` (${percent(right / known.length)})`}` : ''}`;
    this.keep(state);
  }

  card(photo) {
    if (!this.cards.has(photo.number)) {
      const { sort } = this.state;
      const canvas = el('canvas', { 'aria-hidden': 'true' });
      const card = el('li', {}, el('a', { href: `#photo=${photo.number}`, onclick: (event) => this.follow(event, photo.number) }, canvas,
        el('span', { class: 'label' }, photo.target, ' ', el('b', {}, photo.target === photo.label ? amountOf(photo) : photo.of_target)),
        photo.target === photo.label ? null : el('span', { class: 'target' }, `predicted: ${photo.label} ${amountOf(photo)}`),
        rightOrWrong(photo), photo.check ? mapCheck(photo.check) : null,
        el('span', { class: 'name' }, photo.name), el('span', { class: 'figure' })));
      card.dataset.number = photo.number;
      this.cards.set(photo.number, card);
      this.watch.observe(card);
    }
    const card = this.cards.get(photo.number);
    const { sort } = this.state;
    card.querySelector('.figure').textContent = sort.includes(' of ') ? `${sort} ${figure(this.value(photo))}` : '';
    return card;
  }

  // A link of its own, for another tab and for copying; a plain click stays in this one.
  follow(event, number) {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, '', `#photo=${number}`);
    this.open(number);
  }

  async load(card) {
    this.watch.unobserve(card);
    const item = await this.source.item(Number(card.dataset.number));
    const image = el('img', { src: item.photo, alt: '' });
    const first = item.maps[0][0];
    const [plane] = await Promise.all([unpackedPlane(first.plane), image.decode().catch(() => {})]);
    smallPicture(card.querySelector('canvas'), image, item, new FineMap(plane, first.kind, item, first.certainty), this.colors, 200);
  }
}

// A number that what is sorted by is at least, or at most.
function bound(text, change) {
  const id = newId('bound');
  const input = el('input', { type: 'number', id, step: 'any', oninput: () => { if (input.validity.valid) change(input.value); } });
  const label = el('label', { for: id }, text);
  const field = el('div', { class: 'selection' }, label, input);
  field.take = (value, unit) => {
    if (document.activeElement !== input) input.value = value;
    label.textContent = unit ? `${text} (${unit})` : text;
  };
  return field;
}
