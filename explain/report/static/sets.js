// What is enough for an answer and what it needs: the photo with only that, without it, and whole.

const SET_COLORS = ['rgb(213 94 0)', 'rgb(0 114 178)', 'rgb(0 158 115)', 'rgb(204 121 167)', 'rgb(230 159 0)', 'rgb(86 180 233)', 'rgb(240 228 66)'];
const PALE = Math.round(0.82 * 255);

class Sets {
  constructor(item, change) {
    this.item = item;
    const known = { sufficient: 'enough', necessary: 'needed' };
    this.steps = item.methods.flatMap(({ name }, method) => (name in known ? [[known[name], method]] : []));
    this.steps.push(['all', null]);
    const words = (step) => this.steps[step][0];
    this.slider = slider('Shown of the photo', { max: this.steps.length - 1, words }, (step) => {
      const [, method] = this.steps[step];
      change({ view: 'heat', cover: null, not: null, whole: method === null, ...(method === null ? {} : { method, layer: 0 }) });
    });
    this.without = el('button', { type: 'button', class: 'plain-button', 'aria-pressed': 'false', onclick: () => {
      change({ compare: this.state.compare === 'without' ? 'none' : 'without', view: 'heat', cover: null, whole: false });
    } }, 'Wipe to the photo without it');
    this.words = el('p', { class: 'hint', role: 'status' });
    this.element = el('section', { class: 'card sets-card' }, el('h2', {}, 'What is enough?'), this.slider,
      el('div', { class: 'buttons' }, this.without), this.words);
    this.element.hidden = this.steps.length < 2;
  }

  take(state) {
    this.state = state;
    const step = state.whole ? -1 : this.steps.findIndex(([, method]) => method === state.method);
    const { sets, words } = this.item.maps[state.target][state.method];
    this.slider.take(step < 0 ? this.steps.length - 1 : step);
    this.without.disabled = !sets || !sets.length || state.whole;
    this.without.setAttribute('aria-pressed', String(state.compare === 'without'));
    this.words.textContent = state.whole ? 'The whole photo.' : words || 'Move the slider to the left.';
  }

  // A key for each set, in the colour of its line.
  static keys(sets) {
    return sets.map(({ size }, i) => {
      const key = el('i', { class: 'key key-contour' });
      key.style.background = SET_COLORS[i % SET_COLORS.length];
      return el('span', {}, key, `${i ? `reason ${i + 1}: ` : ''}${percent(size)}`);
    });
  }
}

// The number of the set that each cell of a map lies in, from 1; 0 outside. The first one has the largest values.
function setNumbers({ plane }, most) {
  return plane.values.map((share) => {
    const value = share * plane.scale;
    return value > 0 ? most + 1 - Math.ceil(value * most - 0.25) : 0;
  });
}
