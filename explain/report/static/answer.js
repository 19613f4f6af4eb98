document.documentElement.dataset.ready = '';
showWords(document);
