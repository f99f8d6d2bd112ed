"""A response while it is generated: its chat request, its items, and the response object."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from openai_api.chat_choice import ChatChoice
from openai_api.chat_run import ChatRun
from openai_api.openai_context import OpenAIContext
from openai_api.openai_errors import MAX_MESSAGE_CHARS
from openai_api.output_parser import ContentText
from openai_api.responses.chat_of_items import THOUGHTS
from openai_api.responses.compaction import Compaction
from openai_api.responses.item_writer import Event, ItemWriter
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.response_store import StoredResponse
from openai_api.responses.response_usage import usage_of_response
from openai_api.schemas.responses import ResponseRequest
from runtime.client.tenant import TENANT
from runtime.errors import HeadraceError, TooLong
from runtime.requests.identity import created_now
from runtime.service.error_table import describe_error
from runtime.service.generation import Indexed

logger = logging.getLogger(__name__)

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "service_tier", "temperature", "top_p", "user"),
)


class ResponseRun:
    """A response while it is generated.

    Attributes:
        id: the response's id.
        response: the current state of the response object.
        is_stored: whether the response is stored for later requests.
    """

    def __init__(
        self,
        response_id: str,
        request: ResponseRequest,
        items: list[dict[str, Any]],
        tools: OfferedTools,
        run: ChatRun,
        context: OpenAIContext,
        compaction: Compaction | None = None,
    ) -> None:
        """Prepare a response whose chat request the engine has admitted.

        Args:
            response_id: id of the response.
            request: the request.
            items: the conversation to answer.
            tools: the tools of the request.
            run: the admitted chat request's samples.
            context: the server's context.
            compaction: the summary that follows `items`, if one was made.
        """
        self.id = response_id
        self.response = _new_object(response_id, request, context)
        self.is_stored = request.store is not False and context.responses is not None
        self.response["store"] = self.is_stored
        self._items = items
        self._run = run
        self._owner = TENANT.get()
        self._context = context
        keeps = THOUGHTS in (request.include or ()) or not self.is_stored
        self._writer = ItemWriter(response_id, tools, keeps_thoughts=keeps)
        self._compaction = compaction

    def close(self) -> None:
        """Stop reading, and abort the engine's requests that still run."""
        self._run.generation.close()

    def abort(self) -> None:
        """Abort the engine's request; the events continue up to the last one."""
        self._context.service.client.abort(self.id)

    def chunks(self) -> AsyncGenerator[Indexed, None]:
        """Return the engine's chunks, which `streamed` takes."""
        return self._run.generation.chunks()

    async def streamed(self, chunks: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Event, None]:
        """Yield every event of the response in order; if it fails, the last event says so."""
        numbers = itertools.count()
        try:
            async with contextlib.aclosing(self.events(chunks)) as events:
                async for each in events:
                    yield {**each, "sequence_number": next(numbers)}
        except Exception as error:
            for each in self._writer.finish("incomplete"):
                yield {**each, "sequence_number": next(numbers)}
            await self.fail(error)
            yield {
                "type": "response.failed",
                "response": self.response,
                "sequence_number": next(numbers),
            }

    async def whole(self) -> dict[str, Any]:
        """Wait for the complete response and return it.

        Raises:
            HeadraceError: the response failed.
        """
        async with contextlib.aclosing(self.events(self._run.generation.chunks())) as events:
            async for _ in events:
                pass
        return self.response

    async def events(self, chunks: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Event, None]:
        """Yield every event in order, without sequence numbers.

        The response is stored before the last event.

        Raises:
            HeadraceError: the response failed.
        """
        choice, writer = self._run.choices[0], self._writer
        begun = ["created", "queued"] if self.response["background"] else ["created"]
        for word in (*begun, "in_progress"):
            if word == "in_progress" or len(begun) == 1:
                self.response["status"] = "in_progress"
            yield {"type": f"response.{word}", "response": dict(self.response)}
        if self._compaction is not None:
            for each in writer.add(self._compaction.item):
                yield each
        async with contextlib.aclosing(chunks):
            async for _, chunk in chunks:
                outputs = choice.read(chunk)
                logprobs = self._logprobs(choice)
                if not any(isinstance(output, ContentText) for output in outputs):
                    # These logprobs belong to the text that was sent last.
                    writer.add_logprobs(logprobs)
                for each in writer.feed(outputs, logprobs):
                    yield each
        writer.add_logprobs(self._logprobs(choice))
        reason = choice.reason
        is_cut = reason is not None and reason.type == "length"
        is_aborted = reason is not None and reason.type == "abort"
        status = "incomplete" if is_cut else "cancelled" if is_aborted else "completed"
        for each in writer.finish("completed" if status == "completed" else "incomplete"):
            yield each
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        await self._end(status)
        # The API has no event named `response.cancelled`.
        word = "incomplete" if status == "cancelled" else status
        yield {"type": f"response.{word}", "response": self.response}

    def _logprobs(self, choice: ChatChoice) -> list[Any]:
        """Return the logprobs that the choice produced since the last call, one dict per token."""
        found = choice.take_logprobs()
        logprobs: list[Any] = orjson.loads(b"".join(found["content"].pieces())) if found else []
        return logprobs

    async def fail(self, error: Exception) -> None:
        """End the response with an error."""
        if not isinstance(error, HeadraceError):
            logger.error("A response failed", exc_info=error)
        self.response["error"] = _failure(error)
        await self._end("failed")

    async def cancel(self) -> None:
        """End the response without waiting for the engine."""
        self.close()
        await self._end("cancelled")

    async def keep(self) -> None:
        """Store the current state of the response, if it is stored at all."""
        if self.is_stored and self._context.responses is not None:
            stored = StoredResponse(self.response, self._items, self._owner)
            await self._context.responses.put(self.id, stored)

    async def _end(self, status: str) -> None:
        # An item that is still open is ended; its events are not sent.
        deque(self._writer.finish("incomplete"), maxlen=0)
        before = None if self._compaction is None else self._compaction.count
        self.response |= {
            "status": status,
            "output": self._writer.output,
            "usage": usage_of_response(self._run.choices[0].count, self._context, before),
            "completed_at": int(time.time()) if status == "completed" else None,
        }
        await self.keep()


async def refused_stream(
    response_id: str, request: ResponseRequest, error: TooLong, context: OpenAIContext
) -> AsyncGenerator[Event, None]:
    """Yield the events of a response to a conversation that is too long.

    The error is an event because agents shorten the conversation when they find its code in a
    stream. With an HTTP error status they stop.
    """
    response = _new_object(response_id, request, context)
    response |= {"status": "in_progress", "store": False}
    yield {"type": "response.created", "response": dict(response), "sequence_number": 0}
    response |= {"status": "failed", "error": _failure(error)}
    yield {"type": "response.failed", "response": response, "sequence_number": 1}


def _failure(error: Exception) -> dict[str, str]:
    info = describe_error(error)
    code = "server_error" if info.status >= 500 else info.code or "invalid_prompt"
    return {"code": code, "message": info.message[:MAX_MESSAGE_CHARS]}


def _new_object(
    response_id: str, request: ResponseRequest, context: OpenAIContext
) -> dict[str, Any]:
    reasoning, text = request.reasoning, request.text
    form = text.format if text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_now(),
        "completed_at": None,
        "status": "queued",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "model": request.model or context.service.served_model_name,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "text": {"format": _form(form), "verbosity": text.verbosity if text else None},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "usage": None,
        **{name: getattr(request, name) for name in _ECHOED},
    }


def _form(form: Any) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    described = {"type": form.type}
    if form.type == "json_schema":
        described |= {"name": form.name, "schema": form.schema, "strict": form.strict}
    return described
