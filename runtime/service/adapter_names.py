"""Finds the LoRA adapter that a request names: `lora_path` in the native API, `model` elsewhere."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from runtime.client.adapter_record import DISABLED
from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GeneratePlan


async def with_adapters(context: ServiceContext, plan: GeneratePlan) -> GeneratePlan:
    """Look up the adapters that a plan names, and return the plan with their ids in its samples.

    An adapter that is not in the workers' memory is loaded first.

    Raises:
        InvalidRequest: a named adapter does not exist.
    """
    if not any(plan.adapters):
        return plan
    ids = await context.adapters.find_each(plan.adapters)
    samples = [
        dataclasses.replace(
            sample,
            spec=replace(
                sample.spec, row=replace(sample.spec.row, adapter_id=ids[sample.prompt_index])
            ),
        )
        for sample in plan.samples
    ]
    return dataclasses.replace(plan, samples=samples)


async def named_adapter(context: ServiceContext, model: str | None, lora_path: str | None) -> int:
    """Return the id of the adapter that a request names; 0 means no adapter.

    A `model` of the form `served-name:adapter`, or an adapter's name alone, takes precedence over
    `lora_path`. Any other `model` means the served model.

    Raises:
        InvalidRequest: the named adapter does not exist.
    """
    name, record, model = lora_path, context.adapters.record, model or ""
    served = context.served_model_name
    base, _, last = model.rpartition(":")
    if model == served:
        pass
    elif record.is_enabled and model in record:
        return await context.adapters.find(model, "model")
    elif base and base == served:
        if not record.is_enabled:
            raise InvalidRequest(f"model names an adapter, and {DISABLED}.", param="model")
        return await context.adapters.find(last, "model")
    elif base and last in record:
        return await context.adapters.find(last, "model")
    return await context.adapters.find(name) if name else 0
