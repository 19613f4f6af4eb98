// What stands beside the photo: the model's answers, how the map is drawn, why this class and not that one.

class Answers {
  constructor(item, onchange) {
    const name = newId('target');
    const known = new Map(item.targets.map((target, number) => [target.label, number]));
    const rows = item.predictions.map(([label, probability, amount], place) => ({ label, probability, amount, place, number: known.get(label) }));
    const listed = new Set(rows.map((row) => row.label));
    item.targets.forEach((target, number) => {
      if (!listed.has(target.label)) rows.push({ label: target.label, probability: target.probability, amount: target.amount, number, score: target.score });
    });
    this.inputs = new Map();
    const list = rows.map(({ label, probability, amount, number, score, place }) => {
      const bar = probability === null ? null : el('span', { class: 'bar' }, el('i', {}));
      if (bar) bar.firstChild.style.width = `${100 * probability}%`;
      const value = el('b', {}, amountOf({ probability, amount }) || (score === undefined ? '' : `score ${figure(score)}`));
      const words = el('span', { class: 'label' }, label);
      if (number === undefined && item.live?.explain) {
        return el('li', {}, el('button', { type: 'button', class: 'answer ask', title: 'Explain this class too', onclick: () => item.live.explain(place) }, words, value, bar));
      }
      if (number === undefined) {
        return el('li', {}, el('div', { class: 'answer', title: 'Not explained here' }, words, value, bar));
      }
      const input = el('input', { type: 'radio', name, value: number, onchange: () => onchange(number) });
      this.inputs.set(number, input);
      return el('li', {}, el('label', { class: 'answer explained' }, input, words, value, bar));
    });
    const one = item.targets.length < 2;
    const hint = one ? null : el('p', { class: 'hint' }, 'Choose the class that the maps explain.');
    this.element = el('section', { class: 'card' }, el('h2', {}, 'Predictions'),
      el('fieldset', { class: 'answers' }, el('legend', { class: 'hidden' }, 'Class that is explained'), el('ul', {}, list)), hint);
  }

  take(number) {
    this.inputs.forEach((input, i) => { input.checked = i === number; });
  }
}

class Look {
  // `change` gets what is to be different.
  constructor(item, colors, change) {
    this.item = item;
    this.colors = colors;
    this.view = choices('View', VIEWS, (view) => change({ view, opacity: null, cover: null }));
    this.opacity = slider('Opacity', {}, (opacity) => change({ opacity, cover: null }));
    this.share = slider('Share of the evidence shown', { min: 5, step: 1 }, (share) => change({ share, cover: null }));
    this.colormap = selection('Colours', (colormap) => change({ colormap, cover: null }));
    this.layer = selection('Layer', (layer) => change({ layer: Number(layer), cover: null }));
    this.compare = selection('Compare with', (compare) => change({ compare, cover: null }));
    this.bar = el('canvas', { class: 'ramp', 'aria-hidden': 'true' });
    this.legend = el('div', { class: 'legend' });
    this.element = el('section', { class: 'card drawing-card' }, el('h2', {}, 'How it is drawn'), this.view, this.opacity, this.share,
      el('div', { class: 'pair' }, this.colormap, this.layer), this.compare);
  }

  take(state, map, opacity) {
    this.view.take(state.view);
    this.opacity.take(opacity);
    this.share.take(state.share);
    const signed = map.kind === 'signed';
    const names = { plasma: 'Plasma', viridis: 'Viridis', inferno: 'Inferno', cividis: 'Cividis', RdBu_r: 'Red and blue', PuOr_r: 'Orange and violet', print: 'For grey print' };
    const kind = state.view === 'contour' && !signed ? 'heat' : map.kind;
    this.colormap.fill([[null, this.colors.names(kind).map((name) => [name, names[name]])]]);
    this.colormap.take(this.colors.suited(kind, state.colormap));
    this.colormap.hidden = state.view === 'mask' || state.view === 'spotlight';
    this.takeLayers(state);
    this.takeCompare(state);
    this.takeLegend(state, map, opacity);
    const note = this.colors.summedOver(state.view, map);
    if (note) this.legend.append(el('span', {}, note));
  }

  takeLayers(state) {
    const { layers } = this.item.maps[state.target][state.method];
    this.layer.hidden = !layers.length;
    this.layer.fill([[null, [['0', 'all, fused'], ...layers.map((each, i) => [String(i + 1), each.layer])]]]);
    this.layer.take(Math.min(state.layer, layers.length));
  }

  takeCompare(state) {
    const { methods, targets } = this.item;
    const groups = targets.map((target, t) => [targets.length > 1 ? target.label : null,
      methods.map((method, m) => [`map:${t}:${m}`, method.title]).filter(([value]) => value !== `map:${state.target}:${state.method}`)]);
    this.compare.fill([[null, [['none', '–'], ['photo', 'the photo'], ...(this.item.maps[state.target][state.method].sets?.length ? [['without', 'the photo without it']] : [])]], ...groups.filter(([, options]) => options.length)]);
    this.compare.take(state.compare);
    if (this.compare.select.selectedIndex < 0) this.compare.take('none');
  }

  // A grey of the photo, as far as a mask lets it through.
  faded(visible) {
    return `rgb(${this.colors.cover.map((level) => Math.round(level + (this.item.grey - level) * visible)).join(' ')})`;
  }

  takeLegend(state, map, opacity) {
    const words = (text) => el('span', {}, text);
    const shown = state.share < 100 ? [state.share / 100] : this.colors.shares(state.view === 'contour' ? map.kind : 'heat');
    const { sets } = this.item.maps[state.target][state.method];
    if (sets && state.view === 'heat' && state.not === null) {
      this.legend.replaceChildren(...(state.whole ? [] : Sets.keys(sets)));
    } else if (state.view === 'contour' && map.kind === 'signed') {
      const [one, other] = this.colors.sides(shown.length, state.colormap);
      const keys = [[other, 'against, dashed'], [one, 'for']].map(([color, side]) => {
        const key = el('i', { class: 'key key-contour' });
        key.style.background = color;
        return el('span', {}, key, side);
      });
      this.legend.replaceChildren(words(`lines hold ${shown.map(percent).join(', ')}`), ...keys);
    } else if (state.view === 'contour' || state.view === 'mask') {
      const shares = shown;
      const colors = state.view === 'contour' ? this.colors.lines(shares.length, state.colormap) : shares.map((_, i) => this.faded(1 - i / (shares.length + 0.5)));
      const keys = shares.map((share, i) => {
        const key = el('i', { class: `key key-${state.view}` });
        key.style.background = colors[i];
        return el('span', {}, key, percent(share));
      });
      this.legend.replaceChildren(words('share of the evidence inside'), ...keys);
    } else if (state.view === 'spotlight') {
      this.legend.replaceChildren(words('the brighter, the more evidence'));
    } else {
      this.colors.bar(this.bar, map.kind, { colormap: state.colormap, opacity: opacity / 100, grey: this.item.grey, scan: this.item.scan });
      const ends = map.kind === 'signed' ? ['against', 'for'] : ['0', 'max'];
      this.legend.replaceChildren(words(ends[0]), this.bar, words(ends[1]));
    }
  }
}

class Why {
  // "Why this and not that": the map of one class less that of another.
  constructor(item, change) {
    this.item = item;
    this.one = selection('Why', (target) => change({ target: Number(target), cover: null }));
    this.other = selection('and not', (not) => change({ not: not === '' ? null : Number(not), cover: null, compare: 'none' }));
    this.words = el('p', { class: 'hint', role: 'status' });
    this.element = el('section', { class: 'card why-card' }, el('h2', {}, 'Why this, and not that?'),
      el('div', { class: 'pair' }, this.one, this.other), this.words);
    this.element.hidden = item.targets.length < 2;
  }

  take(state) {
    const labels = this.item.targets.map((target, i) => [String(i), target.label]);
    this.one.fill([[null, labels]]);
    this.one.take(state.target);
    this.other.fill([[null, [['', '–'], ...labels.filter(([i]) => Number(i) !== state.target)]]]);
    this.other.take(state.not ?? '');
    const [one, other] = [this.item.targets[state.target], this.item.targets[state.not ?? 0]];
    this.words.textContent = state.not === null
      ? 'Choose a second class: the map then shows the evidence for one minus that for the other.'
      : `Red: more evidence for ${one.label} than for ${other.label}. Blue: the reverse. It is the difference of the two maps in units of the scores, which are ${figure(one.score)} and ${figure(other.score)}.`;
  }
}
