"""The engine: plans and runs the passes that the methods need.

    needs             the kinds of evidence that a method may need, as values; and `Evidence`, which
                      a method is given
    perturbations     perturbed samples: a `Perturbation` makes them, a `Reducer` adds them up
    plan              which passes gather what is needed; prints itself
    validation        what is refused before anything runs
    settings          precision, batch sizes, progress
    output_kinds      how an output comes about: whether a softmax or sigmoid made it, and where in
                      it the scores are
    forward           one forward pass: what was recorded, and what the targets picked
    collectors        one answer for each kind of evidence: what is watched, differentiated and
                      computed
    blocks            transformer blocks, each read out on its own
    derivative        whether a gradient is the derivative of the score
    hooked_gradients  the same gradients by full-backward hooks
    rerun_context     what perturbed samples are made of; how they can be run, found out by a probe
    reruns            all perturbed samples, in batches; those of inputs
    layer_reruns      those of a layer's feature maps
    token_reruns      those of a transformer's tokens
    searches          samples that are chosen by the scores of earlier ones, step by step
    accumulators      where the results of perturbed samples add up
    execution         a plan, run

Beside them stand two accelerators that the engine can do without. Where a network does not fit
them, its passes are run as they are:

    prefix            what lies before a layer, answered with what it gave in an earlier pass
    incremental       a faster call of the network on perturbed inputs, where a trial finds one
    incremental_maps  feature maps that are computed only where the perturbation changes them

A method declares its needs and is otherwise a function of `Evidence`. A new kind of evidence is one
frozen class in `needs` and one function in `collectors`.
"""

from explain.engine.needs import Activations, Evidence, InputGradients, LayerGradients, Need
from explain.engine.perturbations import (
    Accumulator,
    Attributions,
    Perturbation,
    PerturbedRows,
    Reducer,
)

__all__ = [
    "Accumulator",
    "Activations",
    "Attributions",
    "Evidence",
    "InputGradients",
    "LayerGradients",
    "Need",
    "Perturbation",
    "PerturbedRows",
    "Reducer",
]
