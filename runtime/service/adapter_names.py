"""Which adapter (LoRA) a request names: `lora_path` of the native API, `model` of the others."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from runtime.client.adapter_record import DISABLED
from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GeneratePlan


async def with_adapters(context: ServiceContext, plan: GeneratePlan) -> GeneratePlan:
    """Return the plan with the adapters that its prompts name, once the workers have them.

    Raises:
        InvalidRequest: there is no such adapter.
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
    """Return the id of the adapter of a request, 0 for none.

    A model `served-name:adapter`, or an adapter's name alone, goes before `lora_path`. Every other
    name of a model stands for the served one.

    Raises:
        InvalidRequest: there is no such adapter.
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
