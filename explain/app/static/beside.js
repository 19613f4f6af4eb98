// What was shown is kept beside what is shown next; both are looked at in the same way, if they are linked.

const LINKED = ['view', 'opacity', 'share', 'colormap', 'region', 'cover', 'way'];

class Beside {
  constructor(app) {
    this.app = app;
    this.viewer = null;
    this.linked = true;
    this.leads = null;
    this.button = el('button', { type: 'button', class: 'plain-button', 'aria-pressed': 'false', onclick: () => this.toggle() }, 'Pin to compare');
    this.button.title = 'Keep this map, and compare it with another photo, model or layer';
    this.link = el('input', { type: 'checkbox', checked: true, onchange: () => this.linkChanged() });
    this.linkLabel = el('label', { class: 'link', hidden: true, title: 'Both have the same view, region and covering' }, this.link, 'Linked');
    this.buttons = [this.linkLabel, this.button];
    this.element = el('div', { class: 'kept', hidden: true, role: 'region', 'aria-label': 'Pinned to compare' });
    for (const kind of ['pointerdown', 'keydown', 'input', 'focusin']) document.addEventListener(kind, (event) => this.took(event), true);
  }

  toggle() {
    const { app } = this;
    const keeps = this.element.hidden;
    if (keeps && !app.viewer) return;
    this.element.hidden = !keeps;
    this.linkLabel.hidden = !keeps;
    app.place.classList.toggle('two', keeps);
    this.button.setAttribute('aria-pressed', String(keeps));
    this.button.textContent = keeps ? 'Unpin' : 'Pin to compare';
    this.viewer = keeps ? this.copied(app.viewer) : null;
    this.leads = null;
    this.element.replaceChildren(...(keeps ? [this.viewer.element] : []));
  }

  // Nothing is kept.
  drop() {
    if (!this.element.hidden) this.toggle();
  }

  copied(viewer) {
    const item = structuredClone({ ...viewer.item, live: undefined });
    item.live = this.app.checking.of(() => item, this.app.answer, () => this.viewer?.refresh());
    return new Viewer(item, this.app.colors, { state: { ...viewer.state }, widget: true, keep: () => this.follow(this.viewer) });
  }

  // The one of the two that was touched last leads, and the other follows.
  took(event) {
    if (!this.viewer || !this.app.viewer) return;
    if (this.viewer.element.contains(event.target)) this.leads = this.viewer;
    else if (this.app.viewer.element.contains(event.target)) this.leads = null;
  }

  // The kept one, if an event is its own.
  own(event) {
    return this.viewer?.element.contains(event.target) ? this.viewer : null;
  }

  // One of the two was drawn.
  follow(one) {
    const { viewer } = this.app;
    if (!this.viewer || !viewer || !this.linked || one !== (this.leads ?? viewer)) return;
    const other = one === viewer ? this.viewer : viewer;
    const patch = looks(one.state);
    if (JSON.stringify(patch) !== JSON.stringify(looks(other.state))) other.change(patch);
  }

  linkChanged() {
    this.linked = this.link.checked;
    this.follow(this.leads ?? this.app.viewer);
  }

  // How the next photo is looked at: as what is kept.
  look() {
    return this.viewer && this.linked ? looks(this.viewer.state) : {};
  }
}

const looks = (state) => Object.fromEntries(LINKED.map((name) => [name, state[name]]));
