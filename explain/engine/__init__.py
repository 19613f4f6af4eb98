"""The engine: plans and runs the passes that the methods need.

    needs           the kinds of evidence that a method may need, as values
    evidence        what a method sees
    perturbations   altered rows: a `Perturbation` makes them, a `Reducer` adds up their results
    plan            which passes gather what is needed; prints itself
    validation      what is refused before anything runs
    settings        precision, batch sizes, progress
    forward         one forward pass: what was recorded, and what the targets picked
    collectors      one collector for each kind of evidence
    linear_head     a head's weights for a class
    blocks          transformer blocks, each read out on its own
    output_activation
                    whether a network's outputs are probabilities already
    replay          the operations before a layer, recorded and replayed
    rerun_context   what altered rows are made of, how they are run, and whether their scores depend on each other
    batching        altered rows in batches, and the accumulators of their results
    layer_reruns    altered feature maps
    token_subsets   transformers run on some of a photo's tokens
    reruns          altered inputs, and all streams of altered rows
    execution       a plan, run

A method declares its needs and is otherwise a function of `Evidence`. A new kind of evidence is one frozen class in
`needs` and one collector in `collectors`.
"""

from explain.engine.evidence import Evidence, TargetContext
from explain.engine.execution import gather
from explain.engine.needs import (
    Activations,
    Attention,
    AttentionMap,
    AttentionRelevance,
    Backward,
    BiasTerms,
    BlockAttention,
    BlockTokens,
    ClassWeights,
    Concept,
    DetectionSimilarity,
    InputGradients,
    LayerCurvature,
    LayerGradients,
    LayerRelevance,
    Multipliers,
    Need,
    NeedAtLayer,
    Relevance,
    RelevanceCoverage,
    RevealCancel,
    RuleCoverage,
    asks_of,
)
from explain.engine.output_activation import outputs_of
from explain.engine.perturbations import (
    Accumulator,
    Attributions,
    Attributor,
    InOrder,
    Make,
    Perturbation,
    PerturbationRuns,
    PerturbedRows,
    Reducer,
    Scores,
    Unperturbed,
    ZeroInput,
)
from explain.engine.plan import Plan, Stream, plan_of
from explain.engine.reruns import PerturbationRunner
from explain.engine.settings import Precision, Progress, RuntimeSettings
from explain.engine.validation import check_inputs

__all__ = [
    "Accumulator",
    "Activations",
    "Attention",
    "AttentionMap",
    "AttentionRelevance",
    "Attributions",
    "Attributor",
    "Backward",
    "BiasTerms",
    "BlockAttention",
    "BlockTokens",
    "ClassWeights",
    "Concept",
    "DetectionSimilarity",
    "Evidence",
    "InOrder",
    "InputGradients",
    "LayerCurvature",
    "LayerGradients",
    "LayerRelevance",
    "Make",
    "Multipliers",
    "Need",
    "NeedAtLayer",
    "Perturbation",
    "PerturbationRunner",
    "PerturbationRuns",
    "PerturbedRows",
    "Plan",
    "Precision",
    "Progress",
    "Reducer",
    "Relevance",
    "RelevanceCoverage",
    "RevealCancel",
    "RuleCoverage",
    "RuntimeSettings",
    "Scores",
    "Stream",
    "TargetContext",
    "Unperturbed",
    "ZeroInput",
    "asks_of",
    "check_inputs",
    "gather",
    "outputs_of",
    "plan_of",
]
