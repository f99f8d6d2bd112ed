"""Runs steps: applies row changes, builds the batch, runs the model, samples.

If a step fails, the runner finds the sequences that cause the failure.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.greedy import NAN_TOKEN
from runtime.executor.adapter_pool import AdapterPool
from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import build_batch
from runtime.executor.device_errors import losing_device, raise_if_lost
from runtime.executor.expert_recorder import ExpertRecorder
from runtime.executor.graph_buckets import Bucket, GraphLimits
from runtime.executor.graph_runner import GraphRunner
from runtime.executor.host_pool import HostPools
from runtime.executor.image_store import ImageStore
from runtime.executor.out_of_memory import step_failure
from runtime.executor.profiler import Profiler
from runtime.executor.recorded_steps import RecordedSteps
from runtime.executor.row_extras import Named, reported
from runtime.executor.sampler import Sampler
from runtime.executor.staging import to_device
from runtime.models.attention.backend import AttentionBackend
from runtime.models.attention.forward_batch import KVCache
from runtime.models.model import CausalLM
from runtime.models.vision.model import SeeingDecoder
from runtime.step.step_plan import (
    Int32Array,
    Int64Array,
    MaskSource,
    StepPlan,
    StepResult,
    TokenMasks,
)

logger = logging.getLogger(__name__)

NAN_MESSAGE = "The model produced NaN logits for this request."
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass
class Computed:
    """The result of a step, most of it on the device.

    Attributes:
        token_ids: `[num_samples]` int64 on the device; `None` if no token is sampled.
        host_tokens: int64 tokens in host memory, which replace `token_ids` if set. They are valid
            once the device has run the step.
        sample_indices: `[num_samples]`, indices in `host_tokens` of the step's samples; `None` if
            every token is a sample.
        outputs: extra outputs, such as log-probabilities, about the new tokens.
        inputs: extra outputs about the step's prompt chunks.
    """

    token_ids: Tensor | None = None
    host_tokens: Int64Array | None = None
    sample_indices: Int64Array | None = None
    outputs: list[Named] = field(default_factory=list)
    inputs: list[Named] = field(default_factory=list)


class PendingStep:
    """A launched step whose tokens may not be on the host yet.

    On a GPU, `wait` blocks even if the step samples nothing. This limits the steps in flight,
    because graphs read their inputs from a few host buffers, which are reused in turn.
    """

    def __init__(
        self,
        plan: StepPlan,
        computed: Computed,
        failed: dict[int, str],
        device: torch.device,
        *,
        was_retried: bool = False,
    ) -> None:
        """Start to copy the results from the device to the host.

        Args:
            plan: the step's plan.
            computed: the step's results.
            failed: error text by row, for sequences that could not be computed.
            device: the device of the step.
            was_retried: whether the step failed and each sequence was computed alone.
        """
        self._rows = plan.sample_rows
        self._was_retried = was_retried
        self._failed = failed
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._tokens, self._sample_indices = computed.host_tokens, computed.sample_indices
        if computed.token_ids is not None:
            self._tokens = self._copy(computed.token_ids).numpy()
        self._outputs = [(name, each.to_host(self._copy)) for name, each in computed.outputs]
        self._inputs = [(name, each.to_host(self._copy)) for name, each in computed.inputs]
        if self._event is not None:
            self._event.record()

    def _copy(self, source: Tensor) -> Tensor:
        if not source.is_cuda:
            return source
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return pinned.copy_(source, non_blocking=True)

    def wait(self) -> StepResult:
        """Wait until the step is done and its tokens are on the host; return them.

        Raises:
            DeviceLost: the device failed during the step.
        """
        if self._event is not None:
            with losing_device():
                self._event.synchronize()
        result = self._tokens_of_rows()
        result.was_retried = self._was_retried
        for row, found in reported(self._outputs):
            result.outputs.setdefault(row, []).append(found)
        for row, found in reported(self._inputs):
            result.inputs[row, found.extra] = found
        return result

    def _tokens_of_rows(self) -> StepResult:
        if self._tokens is None:
            return StepResult(_NO_TOKENS, self._failed)
        tokens = (
            self._tokens if self._sample_indices is None else self._tokens[self._sample_indices]
        )
        # The tokens are copied, because later steps write to the same memory.
        token_ids = tokens.astype(np.int32)
        bad = token_ids == NAN_TOKEN
        nan_rows: list[int] = self._rows[bad].tolist() if bad.any() else []
        for row in nan_rows:
            self._failed.setdefault(row, NAN_MESSAGE)
        return StepResult(token_ids, self._failed, nan_rows)


class StepRunner(ABC):
    """Launches steps on one device. Subclasses differ in how they compute a step.

    Attributes:
        profiler: records traces of the steps; `None` for no traces.
        recorder: records the experts that steps choose; `None` unless requested at start-up.
        steps: computes the layers, if possible by repeating a recording; `None` for a text encoder.
        delay_s: time to wait before each step is launched, seconds.
        host: the rank's pages and recurrent states in host memory.
    """

    profiler: Profiler | None = None
    recorder: ExpertRecorder | None = None
    steps: RecordedSteps | None = None
    delay_s = 0.0
    host: HostPools = HostPools()

    def __init__(self, rows: BatchRows, *, is_alone: bool) -> None:
        """Create a runner for the rows of the running batch.

        If several ranks compute each step (`is_alone` is false), a failed step is not retried,
        because the ranks' states might then differ.
        """
        self._rows = rows
        self._is_alone = is_alone

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        return False

    def capture_graphs(self, progress: Callable[[float], None]) -> None:  # noqa: B027  # most have none
        """Capture CUDA graphs, if the runner uses any; `progress` receives the fraction done."""

    def drop_graphs(self) -> None:  # noqa: B027  # likewise
        """Destroy the CUDA graphs, because their addresses become invalid.

        Steps run without graphs afterwards.
        """

    def drop_images(self) -> None:  # noqa: B027  # likewise
        """Release the vectors of images; steps must compute them again."""

    @abstractmethod
    def _compute(
        self, plan: StepPlan, masks: MaskSource | None = None, *, with_graphs: bool = True
    ) -> Computed:
        """Start to compute a step whose row changes are applied already."""

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> PendingStep:
        """Start to compute a step.

        If the step fails, each sequence is computed alone, to find those that cause the failure.
        Writing the same keys and values twice is harmless, so the other sequences lose nothing.

        Args:
            plan: the step's plan.
            masks: grammar masks for the step's samples; `None` if no sample is constrained.

        Raises:
            DeviceLost: the device no longer works.
        """
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.profiler is not None:
            self.profiler.num_steps += 1
            if self.profiler.is_waiting:
                with self.profiler.step(plan):
                    return self._recorded(plan, masks)
        return self._recorded(plan, masks)

    def _recorded(self, plan: StepPlan, masks: MaskSource | None) -> PendingStep:
        pending = self._launch(plan, masks)
        if self.recorder is not None and self.recorder.is_on:
            try:
                self.recorder.end_step(plan, self._rows.latest_input)
            except Exception as error:
                raise_if_lost(error)
                logger.exception("Recording of expert use stopped: a step could not be kept")
                self.recorder.stop()
        return pending

    def _launch(self, plan: StepPlan, masks: MaskSource | None) -> PendingStep:
        self._rows.has_inputs = False
        # A retry does not repeat these copies: the step may have overwritten pages that they save.
        if plan.host is not None and self.host.pages is not None:
            self.host.pages.copy(plan.host)
        if plan.host_states is not None and self.host.states is not None:
            self.host.states.copy(plan.host_states)
        try:
            self._rows.apply(plan.joins, plan.page_updates, plan.windows)
            return PendingStep(plan, self._compute(plan, masks), {}, self._rows.device)
        except Exception as error:
            raise_if_lost(error)
            if not self._is_alone:
                raise
            logger.exception("A step of %d sequences failed; trying each alone", len(plan.rows))
        # The retries are outside the handler: the error's traceback would keep the failed step's
        # tensors in memory that the retries may need.
        self._rows.take_back(plan.rows[: plan.num_decodes])
        return self._compute_each(plan, masks, self._join_each(plan))

    def _join_each(self, plan: StepPlan) -> dict[int, str]:
        """Apply the plan's row changes one by one, even those that were applied before the failure.

        Returns:
            The rows whose change failed, with the error text.
        """
        failed: dict[int, str] = {}
        for join in plan.joins:
            try:
                self._rows.apply([join], [])
            except Exception as error:
                raise_if_lost(error)
                logger.exception("A request could not take its row; it ends")
                failed[join.row] = step_failure(error)
        self._rows.apply([], plan.page_updates, plan.windows)
        return failed

    def _compute_each(
        self, plan: StepPlan, masks: MaskSource | None, failed: dict[int, str]
    ) -> PendingStep:
        token_ids = torch.zeros(len(plan.sample_rows), dtype=torch.int64)
        everything = Computed(token_ids)
        sampled = np.cumsum(plan.samples) - 1
        for index in range(len(plan.rows)):
            if int(plan.rows[index]) in failed:
                continue
            # The device must be idle: one step for each sequence would be too many in flight, and
            # would overwrite inputs that an earlier step still reads.
            if self._rows.device.type == "cuda":
                with losing_device():
                    torch.cuda.synchronize()
            try:
                # Graphs are not used. So many graph runs would overwrite the previous step's
                # tokens, which may not be read yet.
                made = made_masks(masks) if plan.samples[index] else None
                mine = None if made is None else made.only(int(sampled[index]))
                result = self._compute(plan.only(index), mine, with_graphs=False)
            except Exception as error:
                raise_if_lost(error)
                logger.exception("One sequence failed; its request ends")
                failed[int(plan.rows[index])] = step_failure(error)
                continue
            if result.token_ids is not None:
                token_ids[sampled[index]] = result.token_ids[0].cpu()
            everything.outputs += result.outputs
            everything.inputs += result.inputs
        return PendingStep(plan, everything, failed, self._rows.device, was_retried=True)


def made_masks(masks: MaskSource | None) -> TokenMasks | None:
    """Return the grammar masks of a step; `None` if it has none. They are made now if needed."""
    return None if masks is None else masks.make()


class ModelRunner(StepRunner):
    """Runs the steps of a text-generating model; owns its KV cache and batch rows on one device."""

    steps: RecordedSteps

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
        adapters: AdapterPool | None = None,
    ) -> None:
        """Create a runner without CUDA graphs.

        Args:
            model: the loaded model.
            attention: the attention back end, which plans once per step.
            kv: the KV cache, one entry per layer.
            rows: the rows of the running batch.
            page_size: number of tokens per page.
            share: replaces the sampled tokens by those of one rank, if several ranks compute each
                step. A failed step is then not retried, because the ranks' states might differ.
            sees_alone: whether the image tower computes each image separately, so that the result
                does not depend on other images.
            adapters: LoRA adapters; `None` if the server takes none.
        """
        self._model = model
        self._attention = attention
        self._kv = kv
        self._is_last_stage = model.context.stage.is_last
        super().__init__(rows, is_alone=share is None and model.context.stage.count == 1)
        self._page_size = page_size
        self._share = share
        self._sampler = Sampler(rows, share)
        self._experts = model.context.expert_counts
        self._images: ImageStore | None = None
        vision = model.spec.vision
        if isinstance(model, SeeingDecoder) and vision is not None:
            self._images = ImageStore(model.visual, vision, rows.device, alone=sees_alone)
        self._adapters = adapters
        self._graphs: GraphRunner | None = None
        self.steps = RecordedSteps(model, rows, is_on=self._is_alone and self._experts is None)

    def add_graphs(self, limits: GraphLimits) -> None:
        """Let steps within `limits` run as CUDA graphs once `capture_graphs` was called."""
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
        """Capture all CUDA graphs, if `add_graphs` was called; if one fails, none is kept."""
        if self._graphs is not None:
            self._graphs.capture(progress)

    def request_kernels_of_graphs(self) -> None:
        """Let the enclosing `compiling_ahead` block compile the kernels of all CUDA graphs."""
        if self._graphs is not None:
            self._graphs.request_kernels()

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        return self._graphs is not None and bool(self._graphs.captured)

    def drop_graphs(self) -> None:
        """Destroy the CUDA graphs, because their addresses become invalid.

        Steps run without graphs afterwards.
        """
        if self._graphs is not None:
            self._graphs.drop()

    def warm_up_images(self) -> None:
        """Run the image tower, if there is one, on a pack of images of each size."""
        if self._images is not None:
            self._images.warm_up()

    def drop_images(self) -> None:
        """Release the vectors of images."""
        if self._images is not None:
            self._images.clear()

    @torch.inference_mode()
    def _compute(
        self, plan: StepPlan, masks: MaskSource | None = None, *, with_graphs: bool = True
    ) -> Computed:
        watches = self._watch_experts(plan)
        if self._images is not None:
            self._images.update(plan)
        if self._adapters is not None:
            self._adapters.prepare(plan.adapter_copies, self._rows.choose_adapters(plan.rows))
        graphs = self._graphs if with_graphs else None
        bucket = None if graphs is None else graphs.find(plan)
        # A graph with prompts does not compute all tokens after the last layer's attention, so it
        # is not used if the experts of all tokens are needed.
        if graphs is not None and bucket is not None and (bucket.decodes or not watches):
            return self._compute_in_graph(graphs, bucket, plan, masks)
        self._rows.grow(plan, self._page_size)
        self._rows.send_pages()
        if plan.decode_tokens is not None:
            self._rows.set_inputs(plan.rows[: plan.num_decodes], plan.decode_tokens)
        batch = build_batch(
            plan, self._rows, self._page_size, self._kv, self._attention, self._images
        )
        self._attention.plan(batch)
        logits_indices = batch.logits_indices
        # The last layer must compute every token if extra outputs or expert choices need it.
        if plan.report_spans or watches:
            batch.logits_indices = None
        hidden = (self.steps if self.steps.can_repeat(plan, batch) else self._model).forward(batch)
        if not self._is_last_stage:
            return Computed()
        chosen = self._asked_experts()
        inputs: list[Named] = []
        if plan.report_spans:
            inputs = self._rows.extras.of_prompts(plan, hidden, self._model.compute_logits, chosen)
        rows = plan.sample_rows
        if not len(rows):
            return Computed(inputs=inputs)
        if logits_indices is not None and len(rows) != len(hidden):
            hidden = hidden.index_select(0, logits_indices)
            chosen = None if chosen is None else chosen.index_select(0, logits_indices)
        logits = self._model.compute_logits(hidden)
        outputs = self._of_hidden(rows, hidden) + self._of_experts(rows, chosen)
        return self._sample(plan, logits, masks, Computed(outputs=outputs, inputs=inputs))

    def _compute_in_graph(
        self, graphs: GraphRunner, bucket: Bucket, plan: StepPlan, masks: MaskSource | None
    ) -> Computed:
        """Run a graph on all sequences, and return the tokens of those that sample."""
        rows = plan.sample_rows
        is_plain = self._sampler.is_plain(rows)
        found = Computed(host_tokens=graphs.run(bucket, plan, wants_logits=not is_plain))
        if len(rows) < len(plan.rows):
            found.sample_indices = np.flatnonzero(plan.samples)
        if self._experts is not None and bucket.decodes:
            # The layers set this value only when the graph was captured.
            self._experts.num_tokens = plan.num_tokens
            found.outputs = self._of_experts(rows, self._asked_experts())
        if is_plain and graphs.hidden is None:
            return found
        wanted: slice | Tensor = slice(len(rows))
        if found.sample_indices is not None:
            (wanted,) = to_device(self._rows.device, found.sample_indices)
        if graphs.hidden is not None:
            found.outputs += self._of_hidden(rows, graphs.hidden[wanted])
        if is_plain:
            return found
        return self._sample(plan, graphs.logits[wanted], masks, found)

    def _sample(
        self, plan: StepPlan, logits: Tensor, masks: MaskSource | None, found: Computed
    ) -> Computed:
        """Sample tokens from `logits`, `[num_samples, vocab_size]`; add the results to `found`."""
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        sampled = self._sampler.sample(logits, plan.sample_rows, positions, made_masks(masks))
        outputs = sampled.extras + found.outputs
        return Computed(sampled.token_ids, outputs=outputs, inputs=found.inputs)

    def _watch_experts(self, plan: StepPlan) -> bool:
        """Return whether the step's expert choices are needed, and tell this to the layers."""
        if self._experts is None:
            return False
        self._experts.is_asked = bool(self._rows.extras.reads_experts[plan.rows].any())
        return self._experts.is_asked or self._experts.is_on

    def _asked_experts(self) -> Tensor | None:
        """Return the experts chosen for the step's tokens; `None` unless a request needs them.

        The shape is `[num_tokens, layers with experts, chosen]`.
        """
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
