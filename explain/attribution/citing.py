"""Where methods come from, as BibTeX entries."""

from collections.abc import Iterator

from explain._utils.errors import MethodError, keywords, shown
from explain._utils.version import __version__
from explain.methods import Citation, Method
from explain.methods.base import MethodLike, get_method, options

_TITLE = f"explain: attribution maps for PyTorch vision models, version {__version__}"


PACKAGE = Citation("explain", "{The explain authors}", _TITLE, 2026, "Python package", "misc")


@keywords()
def cite(*methods: MethodLike) -> str:
    """Return BibTeX entries for explanation methods, or for this package if none is named.

    A method that contains others is cited together with them; no entry comes twice.

    Args:
        methods: names or method objects, such as ``"gradcam"`` or ``"smooth(layercam)"``.

    Raises:
        MethodError: a method is unknown, or does not say where it comes from.

    >>> print(cite("cam"))
    @inproceedings{zhou2016cam,
      author = {Zhou, Bolei and Khosla, Aditya and Lapedriza, Agata and Oliva, Aude and Torralba,
      Antonio}, title = {{Learning Deep Features for Discriminative Localization}}, booktitle =
      {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)}, year = {2016}, doi =
      {10.1109/CVPR.2016.319}, eprint = {1512.04150}, archiveprefix = {arXiv},
    }
    >>> cite("smooth(gradcam)").count("@"), cite().splitlines()[0]
    (2, '@misc{explain,')
    """
    sources = (
        [source for method in methods for source in _sources(get_method(method))]
        if methods
        else [PACKAGE]
    )
    return "\n\n".join(source.bibtex() for source in dict.fromkeys(sources))


def _sources(method: Method) -> Iterator[Citation]:
    """Yield the citation of a method, and those of the methods among its options, however deep.
    The method's own comes first; `cite` keeps the order.
    """
    source = getattr(method, "source", None)
    if not isinstance(source, Citation):
        raise MethodError(
            f"source of {method.name} must be an explain.methods.Citation, got {shown(source)}; "
            "set it"
        )
    yield source
    for option in options(method).values():
        if isinstance(option, Method):
            yield from _sources(option)
