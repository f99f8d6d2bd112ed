"""Runs steps: applies row changes, builds the batch, runs the model, samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import build_batch
from runtime.executor.graph_buckets import Bucket, GraphLimits
from runtime.executor.graph_runner import GraphRunner
from runtime.executor.image_store import ImageStore
from runtime.executor.row_extras import Named
from runtime.executor.sampling.sampler import Sampler
from runtime.executor.staging import to_device
from runtime.executor.step_plan import Int64Array, MaskSource, StepPlan
from runtime.executor.step_runner import Computed, StepRunner, made_masks
from runtime.models.attention.backend import AttentionBackend
from runtime.models.forward_batch import KVCache
from runtime.models.model import CausalLM
from runtime.models.vision.model import SeeingDecoder


class ModelRunner(StepRunner):
    """Owns the model, the KV pages and the batch rows of one device."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        *,
        share: Callable[[Tensor], Tensor] | None = None,
        sees_alone: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            model: loaded.
            attention: planned here, once a step.
            kv: one entry per layer.
            rows: of the running batch.
            page_size: tokens per page.
            share: where several ranks compute each step, gives all of them the tokens of one. A
                step that fails is then not tried again: the ranks would no longer agree.
            sees_alone: the tower computes each image by itself, so that none depends on another.
        """
        self._model = model
        self._attention = attention
        self._kv = kv
        super().__init__(rows, is_alone=share is None)
        self._page_size = page_size
        self._share = share
        self._sampler = Sampler(rows, share)
        self._experts = model.context.expert_counts
        self._images: ImageStore | None = None
        vision = model.spec.vision
        if isinstance(model, SeeingDecoder) and vision is not None:
            self._images = ImageStore(model.visual, vision, rows.device, alone=sees_alone)
        self._graphs: GraphRunner | None = None

    def add_graphs(self, limits: GraphLimits) -> None:
        """Have steps within `limits` run as CUDA graphs, once `capture_graphs` has made them."""
        if self._experts is not None:
            self._experts.note_in_graphs()
        self._graphs = GraphRunner(
            self._model,
            self._attention,
            self._kv,
            self._rows,
            self._page_size,
            limits,
            self._share,
        )

    def capture_graphs(self, progress: Callable[[float], None]) -> None:
        """Capture all graphs, if there are to be any; when that fails, there are none."""
        if self._graphs is not None:
            self._graphs.capture(progress)

    @property
    def has_graphs(self) -> bool:
        """Whether graphs are captured."""
        return self._graphs is not None and bool(self._graphs.captured)

    def drop_graphs(self) -> None:
        """Forget the graphs, whose addresses will no longer hold; steps run without them."""
        if self._graphs is not None:
            self._graphs.drop()

    def warm_up_images(self) -> None:
        """Have the tower, if there is one, compute packs of images of every size."""
        if self._images is not None:
            self._images.warm_up()

    def drop_images(self) -> None:
        """Give the memory of images' vectors back."""
        if self._images is not None:
            self._images.clear()

    @torch.inference_mode()
    def _compute(
        self, plan: StepPlan, masks: MaskSource | None = None, *, with_graphs: bool = True
    ) -> Computed:
        watches = self._watch_experts(plan)
        if self._images is not None:
            self._images.update(plan)
        graphs = self._graphs if with_graphs else None
        bucket = None if graphs is None else graphs.find(plan)
        # Behind the last layer's attention a graph of prompts has lost most tokens.
        if graphs is not None and bucket is not None and (bucket.decodes or not watches):
            return self._compute_in_graph(graphs, bucket, plan, masks)
        self._rows.grow(plan, self._page_size)
        self._rows.send_pages()
        batch = build_batch(
            plan, self._rows, self._page_size, self._kv, self._attention, self._images
        )
        self._attention.plan(batch)
        places = batch.logits_indices
        # What is noted of the last layer's experts is of every token, too.
        if plan.report_spans or watches:
            batch.logits_indices = None
        hidden = self._model.forward(batch)
        chosen = self._asked_experts()
        inputs: list[Named] = []
        if plan.report_spans:
            inputs = self._rows.extras.of_prompts(plan, hidden, self._model.compute_logits, chosen)
        rows = plan.sample_rows
        if not len(rows):
            return Computed(inputs=inputs)
        if places is not None and len(rows) != len(hidden):
            hidden = hidden.index_select(0, places)
            chosen = None if chosen is None else chosen.index_select(0, places)
        logits = self._model.compute_logits(hidden)
        outputs = self._of_hidden(rows, hidden) + self._of_experts(rows, chosen)
        return self._sample(plan, logits, masks, Computed(outputs=outputs, inputs=inputs))

    def _compute_in_graph(
        self, graphs: GraphRunner, bucket: Bucket, plan: StepPlan, masks: MaskSource | None
    ) -> Computed:
        """The tokens of the sequences that want one, from a graph that computes all."""
        rows = plan.sample_rows
        is_plain = self._sampler.is_plain(rows)
        found = Computed(host_tokens=graphs.run(bucket, plan, wants_logits=not is_plain))
        if len(rows) < len(plan.rows):
            found.host_places = np.flatnonzero(plan.samples)
        if self._experts is not None and bucket.decodes:
            # The layers' own notes were made when the graph was captured.
            self._experts.num_tokens = plan.num_tokens
            found.outputs = self._of_experts(rows, self._asked_experts())
        if is_plain and graphs.hidden is None:
            return found
        wanted: slice | Tensor = slice(len(rows))
        if found.host_places is not None:
            (wanted,) = to_device(self._rows.device, found.host_places)
        if graphs.hidden is not None:
            found.outputs += self._of_hidden(rows, graphs.hidden[wanted])
        if is_plain:
            return found
        return self._sample(plan, graphs.logits[wanted], masks, found)

    def _sample(
        self, plan: StepPlan, logits: Tensor, masks: MaskSource | None, found: Computed
    ) -> Computed:
        """Draw tokens from `logits`, `[num_samples, vocab_size]`, beside what was found."""
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        sampled = self._sampler.sample(logits, plan.sample_rows, positions, made_masks(masks))
        outputs = sampled.extras + found.outputs
        return Computed(sampled.token_ids, outputs=outputs, inputs=found.inputs)

    def _watch_experts(self, plan: StepPlan) -> bool:
        """Whether choices of this step's tokens are wanted; the layers are told."""
        if self._experts is None:
            return False
        self._experts.is_asked = bool(self._rows.extras.reads_experts[plan.rows].any())
        return self._experts.is_asked or self._experts.is_on

    def _asked_experts(self) -> Tensor | None:
        """Of the step's tokens, `[num_tokens, layers, chosen]`, where a request asks."""
        if self._experts is None or not self._experts.is_asked:
            return None
        return self._experts.ids().transpose(0, 1)

    def _of_experts(self, rows: Int64Array, chosen: Tensor | None) -> list[Named]:
        return [] if chosen is None else self._rows.extras.of_samples("experts", rows, chosen)

    def _of_hidden(self, rows: Int64Array, hidden: Tensor) -> list[Named]:
        extras = self._rows.extras
        if not extras.reads_hidden[rows].any():
            return []
        return extras.of_samples("hidden", rows, hidden)
