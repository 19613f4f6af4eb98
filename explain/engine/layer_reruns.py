"""Perturbed feature maps of a layer: the network is run with them in place of what the layer
returned."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from explain._utils.errors import note, raised
from explain._utils.nested import first_tensor, replace_first
from explain.engine.accumulators import Add, TargetAccumulators
from explain.engine.perturbations import PerturbedRows
from explain.engine.prefix import LayerPrefix, ReachedError, at_call, prefix_of
from explain.engine.rerun_context import RerunContext, Way, between_far_samples
from explain.engine.settings import raise_unless_of_network
from explain.hooks import HookGroup
from explain.hooks.interventions import intervening_on_samples
from explain.hooks.unwrap import has_hooks


class LayerRerun:
    """Runs a network with other feature maps of a layer, of one image after the other: behind the
    layer all maps together, and what lies before it once, if a probe finds that right."""

    def __init__(
        self,
        context: RerunContext,
        layer: str,
        samples: PerturbedRows,
        accumulators: Sequence[TargetAccumulators],
    ) -> None:
        """Begin for the perturbed samples of a layer, whose feature maps are those of the first
        pass. ``accumulators`` take the results, one for each target."""
        self.context = context
        self.samples = samples
        self._layer = layer
        self._accumulators = accumulators
        self._record = context.forward.records[layer]
        """The layer's call in the first forward pass."""
        self._maps = context.forward.spatial(self._record.activation, layer)
        """The layer's unperturbed feature maps ``(N, C, h, w)`` of all images."""
        self._prefix: LayerPrefix | None = None
        """What lies before the layer for the current image, if it was noted."""

    def begin(self, image: Tensor) -> None:
        """Begin with the feature maps of one image ``(1,)``: find the fastest way to run them that
        a probe finds right, and the number of samples of a batch."""
        context = self.context
        self._image = image
        # a prefix is of one image: kept for further samples where there is but one image
        prefixes = context.state.prefixes if len(context.inputs) == 1 else {}
        # hooks of others would see that not all is run
        if self._layer not in prefixes and not has_hooks(context.model):
            prefixes[self._layer] = self._noted_prefix()
        self._prefix = prefixes.get(self._layer)

        ways: tuple[Way, ...] = ("behind the layer", "together")
        choices = {way: partial(self._unperturbed, way) for way in ways}
        place = (self._layer, int(image))
        self._way_to_run = context.way(place, choices, image)
        context.warn_of_draws()
        self.samples_at_once = context.samples_at_once(self._way_to_run, after=self._layer)

    def _unperturbed(self, way: Way, images: Tensor) -> Any:
        """The network's output for copies of an image's maps between far ones, run in one of the
        ways."""
        return self._run_maps(way, images, between_far_samples(self._maps[images]))

    def confirm(self, samples: int) -> None:
        """Probe after batches of so many samples; see `RerunContext.confirm`."""
        way = self._way_to_run
        self.context.confirm(way, partial(self._unperturbed, way), self._image, samples)

    def run(self, indices: Tensor) -> list[Add]:
        """Run the network with these perturbed feature maps of the image of `begin`. Returns a
        function for each target that adds the results to its accumulators."""
        context = self.context
        images = self.samples.owners[indices]
        maps = self.samples.make(indices)
        first_sample = 0
        if self._way_to_run == "one at a time":
            # the batch is the caller's, with the maps of one image perturbed in their place
            first_sample = int(self._image)
            maps = self._maps.to(maps).index_copy(0, self._image, maps)
            images = torch.arange(len(maps), device=context.device)
        with context.runs_model():
            output = self._run_maps(self._way_to_run, images, maps)
        return [
            accumulators.read_output(images, indices, output, first=first_sample)
            for accumulators in self._accumulators
        ]

    def _noted_prefix(self) -> LayerPrefix | None:
        """Run the network on the image up to the layer, and note what lies before it; None if that
        fails."""
        context = self.context
        record = self._record
        with context.runs_model(), HookGroup(context.model) as group:
            prefix = prefix_of(group, context.model, record.layer, record.call, ends=True)
            # outside of what is noted: later passes make their inputs before it too
            inputs = context.inputs.rows(self._image)
            try:
                with prefix.passing():
                    inputs.call(context.model)
            except ReachedError:
                return prefix
            except Exception as error:  # the network may refuse a single image
                raise_unless_of_network(error)
                note(f"what lies before layer {self._layer} is run again: {raised(error)}")
        return None

    def _run_maps(self, way: Way, images: Tensor, maps: Tensor) -> Any:
        """Run the network with feature maps ``(b, C, h, w)`` of these images in place of what the
        layer returns; return the model's output. The probe and the samples both go through this."""
        context = self.context
        record = self._record
        grid = context.forward.grids.grid(tuple(record.activation.shape), self._layer)
        assert grid is not None  # the maps were laid out by it
        # what lies before the layer is run for the image alone, or answered by its prefix; other
        # ways run the whole network on a sample for each map
        images_before = self._image if way == "behind the layer" else images
        layer_output = record.activation
        # unless each sample has the other images beside it, all maps are of one image
        if way != "one at a time":
            layer_output = grid.repeated(layer_output, images[:1], len(images))
        # as the layer would have returned them
        perturbed = grid.fold(maps.to(layer_output), layer_output)
        prefix = self._prefix if way == "behind the layer" else None

        def replaced(output: Any, overwritten: bool) -> Any:
            """Put the perturbed maps in place of the layer's output, also into an input that the
            layer has overwritten, and let the network run from now on."""
            if prefix is not None:
                prefix.reach()
            tensor = first_tensor(output)
            if tensor is not None and overwritten:
                if tensor.shape == perturbed.shape:
                    # code that still holds the layer's input sees the change too
                    tensor.copy_(perturbed)
                    return None
                # that tensor has fewer samples; NaN shows in the probe if code still reads it
                tensor.fill_(float("nan"))
            return replace_first(output, perturbed)

        inputs = context.inputs.rows(images_before)
        with HookGroup(context.model) as group, intervening_on_samples(images, images_before):
            at_call(group, record.layer, record.call, replaced)
            with nullcontext() if prefix is None else prefix.passing():
                return inputs.call(context.model)
