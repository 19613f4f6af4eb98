"""The papers and programs that methods come from, as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from explain._utils.errors import MethodError, shown

Kind = Literal["inproceedings", "article", "misc"]
_VENUE = {"inproceedings": "booktitle", "article": "journal", "misc": "howpublished"}


@dataclass(frozen=True)
class Source:
    r"""A paper or a program, and how to cite it.

    Args:
        key: what the entry is called, such as ``selvaraju2017gradcam``.
        authors: "Family, Given and Family, Given", as in BibTeX.
        title: as printed; its capitals are kept.
        year: of publication.
        venue: the conference, the journal, or where a preprint or program is found.
        kind: of the entry: a conference paper, an article in a journal, or something else.
        doi, arxiv: its numbers there, where it has some.

    Raises:
        MethodError: the key, the authors or a brace would make no BibTeX entry.

    >>> print(Source("doe2020maps", "Doe, Jane", "Maps of Everything", 2020, "Journal of Maps", "article").bibtex())
    @article{doe2020maps,
      author = {Doe, Jane},
      title = {{Maps of Everything}},
      journal = {Journal of Maps},
      year = {2020},
    }
    """

    key: str
    authors: str
    title: str
    year: int
    venue: str = ""
    kind: Kind = "inproceedings"
    doi: str = ""
    arxiv: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9:_.+-]+", self.key):
            raise MethodError(f"key of a source must be letters, digits and :_.+-, got {shown(self.key)}; change it")
        if self.kind not in _VENUE:
            raise MethodError(f"kind of a source must be one of {', '.join(_VENUE)}, got {shown(self.kind)}; take one")
        for field in (self.authors, self.title):
            if not field or field.count("{") != field.count("}"):
                raise MethodError(
                    f"authors and title of a source must be texts with as many {{ as }}, got {shown(field)}; change it"
                )

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        fields = {
            "author": self.authors,
            "title": f"{{{self.title}}}",
            _VENUE[self.kind]: self.venue,
            "year": str(self.year),
            "doi": self.doi,
            **({"eprint": self.arxiv, "archiveprefix": "arXiv"} if self.arxiv else {}),
        }
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
        return f"@{self.kind}{{{self.key},\n{lines}}}"


_CVPR = "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)"
_ICCV = "IEEE/CVF International Conference on Computer Vision (ICCV)"
_ECCV = "European Conference on Computer Vision (ECCV)"
_WACV = "IEEE Winter Conference on Applications of Computer Vision (WACV)"
_NEURIPS = "Advances in Neural Information Processing Systems (NeurIPS)"
_ICML = "International Conference on Machine Learning (ICML)"
_PREPRINT = "arXiv preprint"

CAM = Source(
    "zhou2016cam",
    "Zhou, Bolei and Khosla, Aditya and Lapedriza, Agata and Oliva, Aude and Torralba, Antonio",
    "Learning Deep Features for Discriminative Localization", 2016, _CVPR,
    doi="10.1109/CVPR.2016.319", arxiv="1512.04150",
)  # fmt: skip
GRADCAM = Source(
    "selvaraju2017gradcam",
    "Selvaraju, Ramprasaath R. and Cogswell, Michael and Das, Abhishek and Vedantam, Ramakrishna and Parikh, Devi and "
    "Batra, Dhruv",
    "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization", 2017, _ICCV,
    doi="10.1109/ICCV.2017.74", arxiv="1610.02391",
)  # fmt: skip
GRADCAMPP = Source(
    "chattopadhay2018gradcampp",
    "Chattopadhay, Aditya and Sarkar, Anirban and Howlader, Prantik and Balasubramanian, Vineeth N.",
    "Grad-CAM++: Generalized Gradient-Based Visual Explanations for Deep Convolutional Networks", 2018, _WACV,
    doi="10.1109/WACV.2018.00097", arxiv="1710.11063",
)  # fmt: skip
SMOOTHGRADCAMPP = Source(
    "omeiza2019smoothgradcampp",
    "Omeiza, Daniel and Speakman, Skyler and Cintas, Celia and Weldermariam, Komminist",
    "Smooth Grad-CAM++: An Enhanced Inference Level Visualization Technique for Deep Convolutional Neural Network "
    "Models", 2019, _PREPRINT, "article", arxiv="1908.01224",
)  # fmt: skip
XGRADCAM = Source(
    "fu2020xgradcam",
    "Fu, Ruigang and Hu, Qingyong and Dong, Xiaohu and Guo, Yulan and Gao, Yinghui and Li, Biao",
    "Axiom-based Grad-CAM: Towards Accurate Visualization and Explanation of CNNs", 2020,
    "British Machine Vision Conference (BMVC)", arxiv="2008.02312",
)  # fmt: skip
HIRESCAM = Source(
    "draelos2020hirescam", "Draelos, Rachel Lea and Carin, Lawrence",
    "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks", 2020, _PREPRINT,
    "article", arxiv="2011.08891",
)  # fmt: skip
PYTORCH_GRAD_CAM = Source(
    "gildenblat2021pytorchgradcam", "Gildenblat, Jacob and {contributors}",
    "PyTorch library for CAM methods", 2021, r"\url{https://github.com/jacobgil/pytorch-grad-cam}", "misc",
)  # fmt: skip
LAYERCAM = Source(
    "jiang2021layercam",
    "Jiang, Peng-Tao and Zhang, Chang-Bin and Hou, Qibin and Cheng, Ming-Ming and Wei, Yunchao",
    "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", 2021,
    "IEEE Transactions on Image Processing", "article", doi="10.1109/TIP.2021.3089943",
)  # fmt: skip
EIGENCAM = Source(
    "muhammad2020eigencam", "Muhammad, Mohammed Bany and Yeasin, Mohammed",
    "Eigen-CAM: Class Activation Map using Principal Components", 2020,
    "International Joint Conference on Neural Networks (IJCNN)",
    doi="10.1109/IJCNN48605.2020.9206626", arxiv="2008.00299",
)  # fmt: skip
KPCACAM = Source(
    "karmani2024kpcacam",
    "Karmani, Sachin and Sivakaran, Thanushon and Prasad, Gaurav and Ali, Mehmet and Yang, Wenbo and Tang, Sheyang",
    "KPCA-CAM: Visual Explainability of Deep Computer Vision Models using Kernel PCA", 2024,
    "IEEE International Workshop on Multimedia Signal Processing (MMSP)",
    doi="10.1109/MMSP61759.2024.10743968", arxiv="2410.00267",
)  # fmt: skip
FEM = Source(
    "fuad2020fem",
    "Fuad, Kazi Ahmed Asif and Martin, Pierre-Etienne and Giot, Romain and Bourqui, Romain and Benois-Pineau, Jenny "
    "and Zemmari, Akka",
    "Features Understanding in 3D CNNs for Actions Recognition in Video", 2020,
    "International Conference on Image Processing Theory, Tools and Applications (IPTA)",
    doi="10.1109/IPTA50016.2020.9286629",
)  # fmt: skip
SHAPLEYCAM = Source(
    "cai2025shapleycam", "Cai, Huaiguang", "CAMs as Shapley Value-based Explainers", 2025, _PREPRINT, "article",
    arxiv="2501.06261",
)  # fmt: skip
FINERCAM = Source(
    "zhang2025finercam",
    "Zhang, Ziheng and Gu, Jianyang and Chowdhury, Arpita and Mai, Zheda and Carlyn, David and Berger-Wolf, Tanya and "
    "Su, Yu and Chao, Wei-Lun",
    "Finer-CAM: Spotting the Difference Reveals Finer Details for Visual Explanation", 2025, _CVPR,
    doi="10.1109/CVPR52734.2025.00898", arxiv="2501.11309",
)  # fmt: skip
REFINECAM = Source(
    "domeniconi2026refinecam",
    "Domeniconi, Luca and Stramiglio, Alessandra and Lombardi, Michele and Salti, Samuele",
    "How to Evaluate and Refine your CAM", 2026, "International Conference on Pattern Recognition (ICPR)",
    arxiv="2605.14641",
)  # fmt: skip
SCORECAM = Source(
    "wang2020scorecam",
    "Wang, Haofan and Wang, Zifan and Du, Mengnan and Yang, Fan and Zhang, Zijian and Ding, Sirui and Mardziel, Piotr "
    "and Hu, Xia",
    "Score-CAM: Score-Weighted Visual Explanations for Convolutional Neural Networks", 2020,
    "IEEE/CVF Conference on Computer Vision and Pattern Recognition Workshops (CVPRW)",
    doi="10.1109/CVPRW50498.2020.00020", arxiv="1910.01279",
)  # fmt: skip
SSCAM = Source(
    "wang2020sscam", "Wang, Haofan and Naidu, Rakshit and Michael, Joy and Kundu, Soumya Snigdha",
    "SS-CAM: Smoothed Score-CAM for Sharper Visual Feature Localization", 2020, _PREPRINT, "article",
    arxiv="2006.14255",
)  # fmt: skip
ISCAM = Source(
    "naidu2020iscam", "Naidu, Rakshit and Ghosh, Ankita and Maurya, Yash and Kundu, Soumya Snigdha",
    "IS-CAM: Integrated Score-CAM for axiomatic-based explanations", 2020, _PREPRINT, "article", arxiv="2010.03023",
)  # fmt: skip
ABLATIONCAM = Source(
    "desai2020ablationcam", "Desai, Saurabh and Ramaswamy, Harish G.",
    "Ablation-CAM: Visual Explanations for Deep Convolutional Network via Gradient-free Localization", 2020, _WACV,
    doi="10.1109/WACV45572.2020.9093360",
)  # fmt: skip
FULLGRAD = Source(
    "srinivas2019fullgrad", r"Srinivas, Suraj and Fleuret, Fran{\c{c}}ois",
    "Full-Gradient Representation for Neural Network Visualization", 2019, _NEURIPS, arxiv="1905.00780",
)  # fmt: skip
LEGRAD = Source(
    "bousselham2025legrad",
    "Bousselham, Walid and Boggust, Angie and Chaybouti, Sofian and Strobelt, Hendrik and Kuehne, Hilde",
    "LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity", 2025, _ICCV,
    arxiv="2404.03214",
)  # fmt: skip
ROLLOUT = Source(
    "abnar2020rollout", "Abnar, Samira and Zuidema, Willem", "Quantifying Attention Flow in Transformers", 2020,
    "Annual Meeting of the Association for Computational Linguistics (ACL)",
    doi="10.18653/v1/2020.acl-main.385", arxiv="2005.00928",
)  # fmt: skip
SALIENCY = Source(
    "simonyan2013saliency", "Simonyan, Karen and Vedaldi, Andrea and Zisserman, Andrew",
    "Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps", 2013, _PREPRINT,
    "article", arxiv="1312.6034",
)  # fmt: skip
INPUTXGRADIENT = Source(
    "shrikumar2016inputxgradient",
    "Shrikumar, Avanti and Greenside, Peyton and Shcherbina, Anna and Kundaje, Anshul",
    "Not Just a Black Box: Learning Important Features Through Propagating Activation Differences", 2016, _PREPRINT,
    "article", arxiv="1605.01713",
)  # fmt: skip
GUIDEDBACKPROP = Source(
    "springenberg2014guidedbackprop",
    "Springenberg, Jost Tobias and Dosovitskiy, Alexey and Brox, Thomas and Riedmiller, Martin",
    "Striving for Simplicity: The All Convolutional Net", 2014, _PREPRINT, "article", arxiv="1412.6806",
)  # fmt: skip
DECONVNET = Source(
    "zeiler2014deconvnet", "Zeiler, Matthew D. and Fergus, Rob",
    "Visualizing and Understanding Convolutional Networks", 2014, _ECCV,
    doi="10.1007/978-3-319-10590-1_53", arxiv="1311.2901",
)  # fmt: skip
INTEGRATEDGRADIENTS = Source(
    "sundararajan2017integratedgradients", "Sundararajan, Mukund and Taly, Ankur and Yan, Qiqi",
    "Axiomatic Attribution for Deep Networks", 2017, _ICML, arxiv="1703.01365",
)  # fmt: skip
LRP = Source(
    "bach2015lrp",
    r"Bach, Sebastian and Binder, Alexander and Montavon, Gr{\'e}goire and Klauschen, Frederick "
    r"and M{\"u}ller, Klaus-Robert and Samek, Wojciech",
    "On Pixel-Wise Explanations for Non-Linear Classifier Decisions by Layer-Wise Relevance Propagation", 2015,
    "PLOS ONE", "article", doi="10.1371/journal.pone.0130140",
)  # fmt: skip
ATTNLRP = Source(
    "achtibat2024attnlrp",
    "Achtibat, Reduan and Hatefi, Sayed Mohammad Vakilzadeh and Dreyer, Maximilian and Jain, Aakriti and Wiegand, "
    "Thomas and Lapuschkin, Sebastian and Samek, Wojciech",
    "AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers", 2024, _ICML, arxiv="2402.05602",
)  # fmt: skip
DEEPLIFT = Source(
    "shrikumar2017deeplift", "Shrikumar, Avanti and Greenside, Peyton and Kundaje, Anshul",
    "Learning Important Features Through Propagating Activation Differences", 2017, _ICML, arxiv="1704.02685",
)  # fmt: skip
GRADIENTSHAP = Source(
    "erion2021expectedgradients",
    "Erion, Gabriel and Janizek, Joseph D. and Sturmfels, Pascal and Lundberg, Scott M. and Lee, Su-In",
    "Improving Performance of Deep Learning Models with Axiomatic Attribution Priors and Expected Gradients", 2021,
    "Nature Machine Intelligence", "article", arxiv="1906.10670",
)  # fmt: skip
SMOOTHGRAD = Source(
    "smilkov2017smoothgrad",
    r"Smilkov, Daniel and Thorat, Nikhil and Kim, Been and Vi{\'e}gas, Fernanda and Wattenberg, Martin",
    "SmoothGrad: removing noise by adding noise", 2017, _PREPRINT, "article", arxiv="1706.03825",
)  # fmt: skip
SMOOTHGRAD2 = Source(
    "hooker2019roar", "Hooker, Sara and Erhan, Dumitru and Kindermans, Pieter-Jan and Kim, Been",
    "A Benchmark for Interpretability Methods in Deep Neural Networks", 2019, _NEURIPS, arxiv="1806.10758",
)  # fmt: skip
VARGRAD = Source(
    "adebayo2018sanity",
    "Adebayo, Julius and Gilmer, Justin and Muelly, Michael and Goodfellow, Ian and Hardt, Moritz and Kim, Been",
    "Sanity Checks for Saliency Maps", 2018, _NEURIPS, arxiv="1810.03292",
)  # fmt: skip


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
