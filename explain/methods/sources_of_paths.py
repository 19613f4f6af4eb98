"""Where the methods come from that follow paths, and those for transformers besides; see `sources`."""

from __future__ import annotations

from explain.methods.sources import Source

_CVPR = "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)"
_ICCV = "IEEE/CVF International Conference on Computer Vision (ICCV)"

BLURINTEGRATEDGRADIENTS = Source(
    "xu2020blurintegratedgradients", "Xu, Shawn and Venugopalan, Subhashini and Sundararajan, Mukund",
    "Attribution in Scale and Space", 2020, _CVPR, doi="10.1109/CVPR42600.2020.00970", arxiv="2004.03383",
)  # fmt: skip
GUIDEDINTEGRATEDGRADIENTS = Source(
    "kapishnikov2021guidedintegratedgradients",
    "Kapishnikov, Andrei and Venugopalan, Subhashini and Avci, Besim and Wedin, Ben and Terry, Michael and Bolukbasi, "
    "Tolga",
    "Guided Integrated Gradients: An Adaptive Path Method for Removing Noise", 2021, _CVPR,
    arxiv="2106.09788",
)  # fmt: skip
IDGI = Source(
    "yang2023idgi", "Yang, Ruo and Wang, Binghui and Bilgic, Mustafa",
    "IDGI: A Framework to Eliminate Explanation Noise from Integrated Gradients", 2023, _CVPR,
    doi="10.1109/CVPR52729.2023.02272", arxiv="2303.14242",
)  # fmt: skip
XRAI = Source(
    "kapishnikov2019xrai",
    r"Kapishnikov, Andrei and Bolukbasi, Tolga and Vi{\'e}gas, Fernanda and Terry, Michael",
    "XRAI: Better Attributions Through Regions", 2019, _ICCV, arxiv="1906.02825",
)  # fmt: skip
CHEFER = Source(
    "chefer2021transformer", "Chefer, Hila and Gur, Shir and Wolf, Lior",
    "Transformer Interpretability Beyond Attention Visualization", 2021, _CVPR,
    arxiv="2012.09838",
)  # fmt: skip
CHEFER_BIMODAL = Source(
    "chefer2021generic", "Chefer, Hila and Gur, Shir and Wolf, Lior",
    "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers", 2021, _ICCV,
    arxiv="2103.15679",
)  # fmt: skip
GRADIENTROLLOUT = Source(
    "gildenblat2020explainability", "Gildenblat, Jacob",
    "Exploring Explainability for Vision Transformers", 2020, r"\url{https://github.com/jacobgil/vit-explain}", "misc",
)  # fmt: skip
