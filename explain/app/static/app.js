// The app: a photo comes, the model answers, and the report's own viewer shows it.

class App extends Page {
  begin() {
    const { models, examples, fills } = this.source.index;
    this.model = 0;
    this.targets = [];
    this.photoInput = new PhotoInput(examples, { take: (file) => this.photoFrom(this.source.send(file)), example: (name) => this.exampleFrom(name), refuse: (text) => this.fail(text) });
    this.modelChoice = selection('Model', (model) => { this.model = Number(model); this.targets = []; this.prepare(); this.ask(); });
    this.modelChoice.fill([[null, models.map(({ name }, number) => [String(number), name])]]);
    this.modelChoice.hidden = models.length < 2;
    this.crop = selection('Part of the photo', () => { this.ask(); this.layers(); });
    this.methods = new MethodChoice(() => this.ask());
    this.search = new LabelSearch((number) => this.alsoExplain(number));
    this.layer = new LayerChoice(() => this.ask());
    this.covering = new Covering(fills, () => this.ask());
    this.beside = new Beside(this);
    this.checking = new Checking(this.source, { say: (text) => this.say(text), progress: (...far) => this.far(...far), fail: (text) => this.fail(text) });
    this.asking = new Asking(this.source, { photo: () => this.photo, say: (text) => this.say(text), progress: (...far) => this.far(...far), fail: (text) => this.fail(text) });
    this.progress = el('progress', { max: 1, value: 0, 'aria-label': 'Perturbed photos done' });
    this.status = el('span', { role: 'status' });
    this.stop = el('button', { type: 'button', class: 'plain-button', hidden: true, onclick: () => this.stopped() }, 'Stop');
    this.trouble = el('p', { class: 'trouble', role: 'alert', hidden: true });
    this.work = el('div', { class: 'work' }, this.status, this.progress, this.stop);
    const save = (path, text) => el('button', { type: 'button', class: 'plain-button', onclick: () => this.save(path) }, text);
    this.photoInput.element.append(this.work, this.trouble);
    this.tools = el('section', { class: 'tools card', 'aria-label': 'Options', hidden: true },
      el('div', { class: 'tool-row' }, this.modelChoice, this.crop, this.search.element, this.layer.element, this.covering.element),
      this.methods.element,
      el('div', { class: 'tool-foot' }, el('div', { class: 'buttons' }, this.beside.buttons, save('save', 'Save the files'), save('report', 'Save the report'))));
    this.current = el('div', { class: 'current' });
    this.place = el('div', { class: 'place' }, this.beside.element, this.current);
    const top = el('div', { class: 'front' }, this.photoInput.element, this.asking.element);
    this.body.replaceChildren(top, this.place, this.tools);
    window.addEventListener('popstate', () => this.restore());
    this.restore();
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
  }

  viewerOf(event) {
    return this.beside.own(event) ?? this.viewer;
  }

  footer() {
    return el('footer', {}, el('p', {}, `explain ${this.source.index.version}. Photos stay on the machine that runs it; nothing is fetched from elsewhere.`));
  }

  // What can be chosen with this model.
  async prepare({ crop = this.crop.select.value, from = null } = {}) {
    const { crops } = this.source.index.models[this.model];
    this.crop.fill([[null, CROPS.filter(([crop]) => crops.includes(crop))]]);
    this.crop.take(crops.includes(crop) ? crop : '');
    this.crop.hidden = crops.length < 2;
    this.search.fill(this.source.index.models[this.model]);
    await this.guarded(async () => this.methods.fill(await this.source.ask('methods', { model: this.model }), this.source.index.limits.seconds));
    if (this.photo) await this.layers();
    if (from !== null) this.layer.field.take(from);
  }

  async layers() {
    await this.guarded(async () => this.layer.fill(await this.source.ask('layers', { model: this.model, photo: this.photo, crop: this.crop.select.value })));
  }

  async photoFrom(promise, example = null) {
    await this.guarded(async () => {
      this.say('Sending the photo …');
      const { photo } = await promise;
      this.targets = [];
      this.open(photo, example);
      await Promise.all([this.ask(), this.layers()]);
    });
  }

  exampleFrom(name) {
    return this.photoFrom(this.source.ask('examples', { name }), name);
  }

  // Another photo takes the place of the one before.
  open(photo, example) {
    this.photo = photo;
    this.example = example;
    this.viewer = null;
    this.coming = null;
    this.covering.reset();
    this.asking.reset(true);
    this.photoInput.small(true, this.body);
    this.tools.hidden = false;
  }

  // No photo: the page as it is at first.
  empty() {
    this.waiting?.abort();
    this.entry = '';
    this.photo = null;
    this.viewer = null;
    this.coming = null;
    this.answer = null;
    this.beside.drop();
    this.asking.reset(false);
    this.photoInput.small(false, this.body);
    this.tools.hidden = true;
    this.trouble.hidden = true;
    this.current.replaceChildren();
    document.title = 'explain';
  }

  // What the address holds, as it is written there.
  get asked() {
    return {
      photo: this.photo, example: this.example, model: this.model, methods: this.methods.chosen.join(','), classes: JSON.stringify(this.targets).slice(1, -1),
      from: this.layer.value, crop: this.crop.select.value,
    };
  }

  // The address says what is shown: what the user asked for is a step that Back undoes.
  remember() {
    if (!this.viewer || !this.photo) return;
    const { item, state } = this.viewer;
    const shows = { ...this.asked, shows: item.methods[state.method].name, of: JSON.stringify(item.targets[state.target].class) };
    const words = JSON.stringify(shows);
    if (this.entry !== null && this.entry !== words && !this.settles) history.pushState(null, '', location.href);
    this.entry = words;
    toAddress(state, VIEW, { ...shows, model: this.model || null, classes: shows.classes || null, crop: shows.crop || null });
  }

  // What the address says is asked and shown: after a reload, after Back, or from a link.
  async restore() {
    const asked = askedInAddress();
    this.entry = null; // the address is this entry's already
    const photo = asked.photo ? await this.known(asked) : null;
    if (!photo) {
      this.empty();
      if (asked.photo) this.fail('The app has forgotten this photo, as it does after an hour and when it ends; choose it again.');
      await this.prepare();
      return;
    }
    const before = JSON.stringify(this.asked);
    this.model = this.source.index.models[asked.model] ? asked.model : 0;
    this.modelChoice.take(this.model);
    this.methods.chosen = asked.methods ?? this.methods.chosen;
    this.targets = asked.classes ?? [];
    if (this.photo !== photo) this.open(photo, asked.example);
    await this.prepare({ crop: asked.crop ?? '', from: asked.from ?? '' });
    this.shows = asked;
    if (this.viewer && before === JSON.stringify(this.asked)) this.viewer.change(this.shown(this.viewer.state, this.viewer.item));
    else await this.ask(asked);
  }

  // The name under which the app has a photo; an example can be opened again after the app has forgotten it.
  async known({ photo, example }) {
    const reply = await fetch(`/photo/${encodeURIComponent(photo)}`).catch(() => ({ ok: false }));
    if (reply.ok) return photo;
    return this.source.index.examples.includes(example) ? (await this.source.ask('examples', { name: example })).photo : null;
  }

  // The state of the viewer that the address asked for, as far as there is something to show.
  shown(state, item) {
    const { shows, of, view } = this.shows;
    const method = item.methods.findIndex(({ name }) => name === shows);
    const target = item.targets.findIndex((each) => each.class === of);
    return { ...state, ...view, method: Math.max(0, method), target: Math.max(0, target), not: null, compare: 'none', layer: 0 };
  }

  alsoExplain(number) {
    const known = this.targets.indexOf(number);
    if (known >= 0) {
      this.viewer?.change({ target: known, not: null, cover: null });
      return;
    }
    const kept = this.targets.slice(0, this.source.index.limits.targets - 1);
    this.targets = [...kept, number];
    this.wanted = number;
    this.ask();
  }

  async ask(shows = null) {
    if (!this.photo) return;
    this.shows = shows;
    this.waiting?.abort();
    const waiting = new AbortController();
    this.waiting = waiting;
    this.checking.drop();
    this.workName = null;
    this.say('The model is running …');
    this.far(null);
    const values = {
      photo: this.photo, model: this.model, methods: this.methods.chosen, targets: this.targets, layer: this.layer.value, crop: this.crop.select.value,
      seconds: Number(this.methods.seconds?.input.value ?? 20), cover: this.covering.asked,
      earlier: this.answer ?? null,
    };
    await this.guarded(() => this.source.steps('explain', values, (step) => (this.waiting === waiting ? this.heard(step) : null), waiting.signal));
  }

  // One step of an answer.
  async heard(step) {
    if (step.work) this.workName = step.work;
    if (step.error) this.fail(step.error);
    if (step.waiting !== undefined) {
      this.stop.hidden = false;
      const names = step.methods.map((name) => this.methods.title(name)).join(', ');
      this.say(step.waiting ? `${names}: ${step.waiting} before it` : `${names} …`);
    }
    if (step.item) await this.show(step);
    if (step.progress) await this.sharpen(step);
    if (step.end) this.ended(step);
  }

  async show({ item, answer, seconds, notes }) {
    this.answer = answer;
    const checks = this.checking.of(() => this.viewer?.item ?? item, answer, () => this.viewer?.refresh());
    item.live = { explain: (place) => item.classes[place] === null ? null : this.alsoExplain(item.classes[place]), ...checks };
    const before = this.viewer;
    const state = before ? { ...before.state } : this.beside.look();
    if (before) this.carry(before, item, state);
    if (this.shows) Object.assign(state, this.shown(state, item));
    this.targets = item.targets.map((target) => target.class);
    if (this.targets.includes(this.wanted)) state.target = this.targets.indexOf(this.wanted);
    else if (typeof this.targets[0] === 'string' && this.wanted !== undefined) state.target = this.targets.length - 1; // the best box of a class
    this.wanted = undefined;
    this.source.items[0] = item;
    this.settles = Boolean(this.shows) || this.answered === this.waiting; // a further step of one answer
    this.answered = this.waiting;
    await this.put(item, state);
    this.settles = false;
    this.covering.told(item);
    const early = item.maps[0].map(({ remark }, number) => (/^stopped early/.test(remark) ? `${item.methods[number].title} ${remark}` : null)).filter(Boolean);
    this.say(`${item.model}: ${seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`}${[...early, ...notes].map((note) => `. ${note}`).join('')}`);
    document.title = `${item.predictions[0]?.[0] ?? item.targets[0].label} – ${item.name}`;
  }

  // The state by names, since numbers may mean something else now.
  carry(before, item, state) {
    const method = before.item.methods[before.state.method]?.name;
    const target = before.item.targets[before.state.target]?.class;
    state.method = Math.max(0, item.methods.findIndex(({ name }) => name === method));
    state.target = Math.max(0, item.targets.findIndex((each) => each.class === target));
    state.compare = state.compare === 'photo' ? 'photo' : 'none';
    state.not = null;
    state.layer = 0;
  }

  // An answer takes the place of the one before when it is drawn, so that nothing moves; so does the focus in it.
  async put(item, state) {
    const keep = (kept) => {
      this.covering.take(kept.region);
      this.beside.follow(this.viewer);
      if (this.viewer?.state === kept) this.remember();
    };
    const viewer = new Viewer(item, this.colors, { state, keep });
    this.coming = viewer;
    await viewer.ready;
    if (this.coming !== viewer) return;
    const focus = counterpart(document.activeElement, this.viewer, viewer);
    this.viewer = viewer;
    this.current.replaceChildren(viewer.element);
    this.remember();
    focus?.focus({ preventScroll: true });
    this.beside.follow(viewer);
  }

  // A map that is not finished: a method more at first, then a new map in its place.
  async sharpen({ progress: [done, total], method, about, maps }) {
    this.far(done, total);
    this.say(`${this.methods.title(method)}: ${done} of ${total} perturbed photos`);
    if (!maps || !this.viewer) return;
    const { item, state } = this.viewer;
    const number = item.methods.findIndex(({ name }) => name === method);
    if (number < 0) {
      const last = item.methods.push(about) - 1;
      maps.forEach((map, target) => item.maps[target].push(map));
      item.records.forEach((records) => records.push(null));
      await this.put(item, { ...state, method: state.target ? state.method : last });
      return;
    }
    [item.maps[0][number]] = maps; // of the other answers, nothing is known until the end
    this.viewer.maps.delete(`0/${number}/0`);
    this.viewer.smallOf = undefined;
    this.viewer.refresh();
  }

  // How far the work is, and that it can be stopped; null when it has ended.
  far(done, total) {
    this.progress.hidden = done === null;
    this.stop.hidden = done === null;
    if (done !== null) this.progress.value = total ? done / total : 0;
  }

  ended(step) {
    this.workName = null;
    this.far(null);
    if (step.stopped) this.say(`${this.methods.title(step.stopped)} was stopped before it had something to show.`);
  }

  stopped() {
    this.stop.hidden = true;
    this.checking.stop();
    this.asking.stop();
    if (this.workName) this.guarded(() => this.source.ask('stop', { work: this.workName }));
  }

  async save(path) {
    if (this.answer) await this.guarded(() => this.source.save(path, { answer: this.answer }));
  }

  say(text) {
    this.trouble.hidden = true;
    this.status.textContent = text;
  }

  fail(text) {
    this.status.textContent = '';
    this.trouble.textContent = text;
    this.trouble.hidden = false;
  }

  // What goes wrong is said where it is seen; what was given up is no trouble.
  async guarded(work) {
    try {
      await work();
    } catch (error) {
      if (error.name !== 'AbortError') this.fail(error.message);
    }
  }
}

// The element of a viewer that is what `element` is in the viewer before it.
function counterpart(element, before, after) {
  if (!before?.element.contains(element)) return null;
  if (element === before.stage.element) return after.stage.element;
  const name = (each) => (each.labels?.[0] ?? each).textContent;
  return [...after.element.querySelectorAll(element.tagName)].find((each) => name(each) === name(element));
}

window.explainPage = new App(document.getElementById('app'), new LiveSource(document));
