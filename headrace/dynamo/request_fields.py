"""Translates Dynamo's requests to those of the native API, and answers back to Dynamo's chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dynamo.common.backend.logprobs import build_sglang_logprob_kwargs, extract_from_sglang_meta
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument

from headrace.engine.call_arguments import build_body
from runtime.errors import EngineDead, EngineNotReady, HeadraceError, InvalidRequest
from runtime.service.generate_request import GenerateBody

# Parameters with the same name in both APIs.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)


def read_request(request: Mapping[str, Any]) -> GenerateBody:
    """Return the body of the native API for a request that Dynamo's frontend has tokenized.

    Stop strings are not passed on: the frontend finds them in the text and cancels the request.

    Raises:
        InvalidRequest: a value is of the wrong type, or the request has images, several samples or
            asks for log-probabilities of the prompt.
    """
    if request.get("multi_modal_data"):
        raise InvalidRequest("Images do not reach a worker of Dynamo; use the server's own API.")
    sampling = request.get("sampling_options") or {}
    if (sampling.get("n") or 1) > 1:
        # Dynamo's code in the worker's process stops reading when the first sample has ended.
        raise InvalidRequest("n must be 1 with a worker of Dynamo.", param="n")
    output = request.get("output_options") or {}
    if output.get("prompt_logprobs") is not None:
        raise InvalidRequest(
            "A worker of Dynamo returns log-probabilities of the output only.",
            param="prompt_logprobs",
        )
    stop = request.get("stop_conditions") or {}
    ids = {*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())}
    params = {
        **{name: sampling.get(name) for name in _SAME},
        "sampling_seed": sampling.get("seed"),
        "min_new_tokens": stop.get("min_tokens"),
        "ignore_eos": stop.get("ignore_eos"),
        "stop_token_ids": sorted(ids) or None,
        **_grammar(sampling.get("guided_decoding") or {}),
    }
    params = {name: value for name, value in params.items() if value is not None}
    # Without a limit, the output may fill the context.
    params["max_new_tokens"] = stop.get("max_tokens")
    options = build_sglang_logprob_kwargs(output)
    return build_body(None, params, list(request["token_ids"]), True, options)


def _grammar(guided: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter for a constraint of the output; the frontend allows one at most."""
    if (schema := guided.get("json")) is not None:
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if (regex := guided.get("regex")) is not None:
        return {"regex": regex}
    if choices := guided.get("choice"):
        return {"regex": "|".join(re.escape(str(each)) for each in choices)}
    if (grammar := guided.get("grammar")) is not None:
        return {"ebnf": grammar}
    if (tag := guided.get("structural_tag")) is not None:
        return {"structural_tag": tag if isinstance(tag, str) else json.dumps(tag)}
    return {}


def chunk_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return Dynamo's chunk for the new part of an answer of the native API."""
    meta = answer["meta_info"]
    chunk = {"token_ids": answer["output_ids"], "index": 0}
    log_probs, top = extract_from_sglang_meta(meta)
    if log_probs is not None:
        chunk |= {"log_probs": log_probs, "top_logprobs": top}
    if (finish := meta["finish_reason"]) is None:
        return chunk
    num_prompt, num_output = meta["prompt_tokens"], meta["completion_tokens"]
    return chunk | {
        # Errors are exceptions, so only a client ends an answer by `abort`.
        "finish_reason": "cancelled" if finish["type"] == "abort" else finish["type"],
        "completion_usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
        },
    }


def translate(error: HeadraceError) -> Exception:
    """Return Dynamo's exception for an error of the engine."""
    match error:
        case InvalidRequest():
            return InvalidArgument(error.message)
        case EngineDead() | EngineNotReady():
            # The frontend may send the request to another worker.
            return EngineShutdown(error.message)
        case _:
            return HttpError(error.status_code, error.message)
