"""The engine: plans and runs the passes that the methods need.

    needs           the kinds of evidence that a method may need, as values
    evidence        what a method sees
    perturbations   perturbed rows: a `Perturbation` makes them, a `Reducer` adds up their results
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
    rerun_context   what perturbed rows are made of, how they are run, and whether their scores depend on each other
    batching        perturbed rows in batches, and the accumulators of their results
    layer_reruns    perturbed feature maps
    token_subsets   transformers run on some of a photo's tokens
    reruns          perturbed inputs, and all streams of perturbed rows
    execution       a plan, run

A method declares its needs and is otherwise a function of `Evidence`. A new kind of evidence is one frozen class in
`needs` and one collector in `collectors`.
"""

from explain.engine.evidence import Evidence
from explain.engine.needs import Activations, InputGradients, LayerGradients, Need
from explain.engine.perturbations import Accumulator, Attributions, Perturbation, PerturbedRows, Reducer

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
