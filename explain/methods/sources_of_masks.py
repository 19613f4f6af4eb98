"""Where the methods come from that run a model on altered photos; see `sources`."""

from __future__ import annotations

from explain.methods.sources import Source

_NEURIPS = "Advances in Neural Information Processing Systems"
_ICCV = "IEEE/CVF International Conference on Computer Vision"

OCCLUSION = Source(
    "zeiler2014occlusion", "Zeiler, Matthew D. and Fergus, Rob",
    "Visualizing and Understanding Convolutional Networks", 2014, "European Conference on Computer Vision",
    doi="10.1007/978-3-319-10590-1_53", arxiv="1311.2901",
)  # fmt: skip
PERMUTATION = Source(
    "fisher2019permutation", "Fisher, Aaron and Rudin, Cynthia and Dominici, Francesca",
    "All Models are Wrong, but Many are Useful: Learning a Variable's Importance by Studying an Entire Class of "
    "Prediction Models Simultaneously", 2019, "Journal of Machine Learning Research", "article", arxiv="1801.01489",
)  # fmt: skip
RISE = Source(
    "petsiuk2018rise", "Petsiuk, Vitali and Das, Abir and Saenko, Kate",
    "RISE: Randomized Input Sampling for Explanation of Black-box Models", 2018, "British Machine Vision Conference",
    arxiv="1806.07421",
)  # fmt: skip
DRISE = Source(
    "petsiuk2021drise",
    "Petsiuk, Vitali and Jain, Rajiv and Manjunatha, Varun and Morariu, Vlad I. and Mehra, Ashutosh and Ordonez, "
    "Vicente and Saenko, Kate",
    "Black-box Explanation of Object Detectors via Saliency Maps", 2021,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition", arxiv="2006.03204",
)  # fmt: skip
LIME = Source(
    "ribeiro2016lime", "Ribeiro, Marco Tulio and Singh, Sameer and Guestrin, Carlos",
    "\"Why Should I Trust You?\": Explaining the Predictions of Any Classifier", 2016,
    "ACM SIGKDD International Conference on Knowledge Discovery and Data Mining",
    doi="10.1145/2939672.2939778", arxiv="1602.04938",
)  # fmt: skip
KERNELSHAP = Source(
    "lundberg2017shap", "Lundberg, Scott M. and Lee, Su-In",
    "A Unified Approach to Interpreting Model Predictions", 2017, _NEURIPS, arxiv="1705.07874",
)  # fmt: skip
SHAPLEYSAMPLING = Source(
    "strumbelj2014shapley", r"{\v S}trumbelj, Erik and Kononenko, Igor",
    "Explaining prediction models and individual predictions with feature contributions", 2014,
    "Knowledge and Information Systems", "article", doi="10.1007/s10115-013-0679-x",
)  # fmt: skip
OWEN = Source(
    "owen1977values", "Owen, Guilliermo", "Values of Games with a Priori Unions", 1977,
    "Mathematical Economics and Game Theory", doi="10.1007/978-3-642-45494-3_7",
)  # fmt: skip
SOBOL = Source(
    "fel2021sobol",
    r"Fel, Thomas and Cad{\`e}ne, R{\'e}mi and Chalvidal, Mathieu and Cord, Matthieu and Vigouroux, David and Serre, "
    "Thomas",
    "Look at the Variance! Efficient Black-box Explanations with Sobol-based Sensitivity Analysis", 2021, _NEURIPS,
    arxiv="2111.04138",
)  # fmt: skip
HSIC = Source(
    "novello2022hsic", "Novello, Paul and Fel, Thomas and Vigouroux, David",
    "Making Sense of Dependence: Efficient Black-box Explanations Using Dependence Measure", 2022, _NEURIPS,
    arxiv="2206.06219",
)  # fmt: skip
EXTREMAL = Source(
    "fong2019extremal", "Fong, Ruth and Patrick, Mandela and Vedaldi, Andrea",
    "Understanding Deep Networks via Extremal Perturbations and Smooth Masks", 2019, _ICCV, arxiv="1910.08485",
)  # fmt: skip
VITCX = Source(
    "xie2023vitcx", "Xie, Weiyan and Li, Xiao-Hui and Cao, Caleb Chen and Zhang, Nevin L.",
    "ViT-CX: Causal Explanation of Vision Transformers", 2023,
    "International Joint Conference on Artificial Intelligence", arxiv="2211.03064",
)  # fmt: skip
TIS = Source(
    "englebert2023tis",
    r"Englebert, Alexandre and Stassin, S{\'e}drick and Nanfack, G{\'e}raldin and Mahmoudi, Sidi Ahmed and Siebert, "
    "Xavier and Cornu, Olivier and De Vleeschouwer, Christophe",
    "Explaining through Transformer Input Sampling", 2023,
    "IEEE/CVF International Conference on Computer Vision Workshops",
)  # fmt: skip
