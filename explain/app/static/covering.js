// A region is covered: what the model says without it.

class Covering {
  constructor(fills, change) {
    this.change = change;
    this.active = false;
    this.before = null;
    this.fillChoice = selection('Cover with', () => { if (this.active) change(); });
    this.fillChoice.fill([[null, fills]]);
    this.button = el('button', { type: 'button', class: 'plain-button', 'aria-pressed': 'false', disabled: true, onclick: () => this.toggle() }, 'Cover the region');
    this.words = el('p', { class: 'hint', role: 'status' });
    this.element = el('div', { class: 'cover-choice' }, this.fillChoice, this.button, this.words);
    this.take(null);
  }

  // The region that is drawn, or none.
  take(region) {
    const moved = JSON.stringify(region) !== JSON.stringify(this.region ?? null);
    this.region = region;
    this.button.disabled = !region && !this.active;
    if (!region && !this.active) this.words.textContent = 'Draw a region on the photo, then cover it.';
    if (!moved || !this.active) return;
    clearTimeout(this.waits);
    this.waits = setTimeout(() => { if (region) this.change(); else this.toggle(); }, 250);
  }

  toggle() {
    this.active = !this.active && Boolean(this.region);
    this.show();
    this.change();
  }

  // Another photo: nothing is covered.
  reset() {
    this.active = false;
    this.before = null;
    this.region = null;
    this.show();
    this.take(null);
  }

  show() {
    this.button.setAttribute('aria-pressed', String(this.active));
    this.button.textContent = this.active ? 'Uncover it' : 'Cover the region';
  }

  get asked() {
    return this.active && this.region ? { region: this.region, fill: this.fillChoice.select.value } : null;
  }

  // What became of the answers; `item` is of the photo as it is asked about now.
  told(item) {
    if (!this.active) {
      this.before = new Map(item.targets.map((target) => [target.class, target]));
      this.words.textContent = this.region ? 'Cover the region to see the predictions without it.' : 'Draw a region on the photo, then cover it.';
      return;
    }
    const now = item.targets.map((target) => [target, this.before?.get(target.class)]).filter(([, before]) => before);
    this.words.textContent = now.map(([target, before]) => `${target.label}: ${amountOf(before)} → ${amountOf(target)}`).join('; ');
  }
}
