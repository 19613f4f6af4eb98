// Words as buttons: what is pointed at or focused shows its map, and a click or the focus keeps it.

function showWords(root) {
  const words = [...root.querySelectorAll('.sentence button')];
  let kept = words.find((word) => !word.classList.contains('pale')) || words[0];

  function show(word) {
    for (const one of words) {
      const isShown = one === word;
      one.setAttribute('aria-pressed', String(isShown));
      root.querySelector(`#word-${one.dataset.word}`).classList.toggle('shown', isShown);
    }
  }

  function keep(word) {
    kept = word;
    show(word);
  }

  for (const word of words) {
    word.addEventListener('pointerenter', () => show(word));
    word.addEventListener('pointerleave', () => show(kept));
    word.addEventListener('focus', () => keep(word));
    word.addEventListener('click', () => keep(word));
  }
  show(kept);
}
