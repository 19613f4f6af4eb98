"""The engine: the fewest passes that gather what the methods asked for need.

    entry       what is refused before anything runs
    bytensor    values by tensors, compared by identity
    rectifiers which calls rectify, however they are written
    constants   what is added: biases, shifts, parameters and buffers
    operations  what happens in a forward pass, as it happens
    rules       what a backward pass does at an operation, as values
    calls       calls of functions, made again with other arguments
    linear_maps linear maps among them
    keeping     tensors as they were, copied before they are overwritten
    steps       the steps of a forward pass that relevance rules act on
    relevance   relevance propagated through them
    prefix      what happens to the input before the first of them
    linear_rules, step_rules
                the rules, as values
    awake       attention that the explained input does not reach
    passing     rules that hand relevance on as it comes
    composites  which rule covers which step
    revealing   differences in two parts, followed apart
    differences differences from a reference, handed back
    asks        what a method may ask for, as values
    evidence    what a method sees
    altered     altered rows, as values
    plan        which passes gather what was asked for; prints itself
    work        precision, batch sizes, progress
    linear      a head's weights for a class
    blocks      transformer blocks, each read out on its own
    outputs     whether a network's outputs are probabilities already
    forward     one forward pass: what was recorded, and what the targets picked
    collect     one collector for each kind of evidence
    replay      what lies before a layer, run once
    asked       what altered rows are made of and how they are run
    pieces      rows in pieces of the best size, and who reads the results
    behind      altered feature maps: what lies behind a layer, run many times
    sampled     transformers run on some of a photo's tokens
    reruns      altered rows, run once for all that is asked of them
    passes      a plan, run

A method declares its needs and is otherwise a function of `Evidence`. A new kind of evidence is one frozen class in
`asks` and one collector in `collect`.
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
    Make,
    PartialResults,
    Perturbation,
    PerturbationRunner,
    PerturbationRuns,
    PerturbedRows,
    Reducer,
    Scores,
    SizeDependent,
    TokenPerturbation,
    Unperturbed,
    ZeroInput,
)
from explain.engine.plan import Plan, Stream, plan_of
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
    "InputGradients",
    "LayerCurvature",
    "LayerGradients",
    "LayerRelevance",
    "Make",
    "Multipliers",
    "Need",
    "NeedAtLayer",
    "PartialResults",
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
    "SizeDependent",
    "Stream",
    "TargetContext",
    "TokenPerturbation",
    "Unperturbed",
    "ZeroInput",
    "asks_of",
    "check_inputs",
    "gather",
    "outputs_of",
    "plan_of",
]
