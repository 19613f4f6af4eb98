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

from explain.engine.altered import (
    Alteration,
    Attributions,
    Blank,
    Collected,
    Explains,
    Fold,
    Gradual,
    Make,
    OfSize,
    OfTokens,
    Reruns,
    Rows,
    Runs,
    Scores,
    Unaltered,
)
from explain.engine.asks import (
    Activations,
    Ask,
    Attention,
    AttentionMap,
    AttentionRelevance,
    Backward,
    BiasTerms,
    BlockAttention,
    BlockTokens,
    ClassWeights,
    Concept,
    InputGradients,
    LayerCurvature,
    LayerGradients,
    LayerRelevance,
    Likeness,
    Multipliers,
    Need,
    Relevance,
    RelevanceCoverage,
    Revealed,
    RuleCoverage,
    asks_of,
)
from explain.engine.composites import COMPOSITES, Composite, When, transformer_attribution
from explain.engine.entry import check_inputs
from explain.engine.evidence import Evidence, Question
from explain.engine.linear_rules import AlphaBeta, Epsilon, Flat, Gamma, Gradient, WSquare, ZBox, ZPlus
from explain.engine.outputs import outputs_of
from explain.engine.passes import gather
from explain.engine.passing import Balanced, Norm, Pass
from explain.engine.plan import Plan, Stream, plan_of
from explain.engine.rules import Coverage, Deconvnet, Guided, Rule
from explain.engine.step_rules import ConstantDeviation, Constants, ConstantWeights, Identity, Taylor, Uniform
from explain.engine.work import Precision, Progress, Work

__all__ = [
    "COMPOSITES",
    "Activations",
    "AlphaBeta",
    "Alteration",
    "Ask",
    "Attention",
    "AttentionMap",
    "AttentionRelevance",
    "Attributions",
    "Backward",
    "Balanced",
    "BiasTerms",
    "Blank",
    "BlockAttention",
    "BlockTokens",
    "ClassWeights",
    "Collected",
    "Composite",
    "Concept",
    "ConstantDeviation",
    "ConstantWeights",
    "Constants",
    "Coverage",
    "Deconvnet",
    "Epsilon",
    "Evidence",
    "Explains",
    "Flat",
    "Fold",
    "Gamma",
    "Gradient",
    "Gradual",
    "Guided",
    "Identity",
    "InputGradients",
    "LayerCurvature",
    "LayerGradients",
    "LayerRelevance",
    "Likeness",
    "Make",
    "Multipliers",
    "Need",
    "Norm",
    "OfSize",
    "OfTokens",
    "Pass",
    "Plan",
    "Precision",
    "Progress",
    "Question",
    "Relevance",
    "RelevanceCoverage",
    "Reruns",
    "Revealed",
    "Rows",
    "Rule",
    "RuleCoverage",
    "Runs",
    "Scores",
    "Stream",
    "Taylor",
    "Unaltered",
    "Uniform",
    "WSquare",
    "When",
    "Work",
    "ZBox",
    "ZPlus",
    "asks_of",
    "check_inputs",
    "gather",
    "outputs_of",
    "plan_of",
    "transformer_attribution",
]
