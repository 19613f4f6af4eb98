// The address says what is asked and shown: the page can be reloaded and bookmarked while the app runs, and Back goes back.

const CROPS = [['', 'as the model is used to'], ['square', 'the largest square'], ['whole', 'the whole photo']];

// Of the viewer's state, what is no number of a method or class: these have their names in the address.
const VIEW = Object.fromEntries(Object.entries(USUAL).filter(([name]) => ['view', 'opacity', 'share', 'colormap', 'wipe', 'cover', 'way', 'region', 'whole'].includes(name)));

function askedInAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const asked = {};
  for (const name of ['photo', 'example', 'shows', 'from', 'crop']) if (words.get(name)) asked[name] = words.get(name);
  if (words.get('methods')) asked.methods = words.get('methods').split(',');
  if (/^\d+$/.test(words.get('model') ?? '')) asked.model = Number(words.get('model'));
  asked.classes = parsed(`[${words.get('classes') ?? ''}]`);
  asked.of = parsed(words.get('of') ?? 'null') ?? undefined;
  if (asked.classes && !asked.classes.every((each) => ['number', 'string'].includes(typeof each))) asked.classes = [];
  asked.view = { ...VIEW, ...pick(fromAddress(), VIEW) };
  return asked.photo ? asked : {};
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
