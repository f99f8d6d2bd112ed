"""The table of the OpenAI routes; each endpoint has a file in `openai_api.endpoints`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from openai_api.call import Call, Reply
from openai_api.openai_context import OpenAIContext
from openai_api.openai_errors import StreamedErrorBody
from openai_api.responses.item_list import MAX_LIMIT
from openai_api.schemas.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Classification,
    Completion,
    CompletionChunk,
    EmbeddingList,
    ModelCard,
    ModelList,
)
from openai_api.schemas.batches import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileForm,
    FileList,
    FileObject,
)
from openai_api.schemas.chat import ChatCompletionRequest, FunctionSpec, Tool
from openai_api.schemas.classify import ClassifyRequest
from openai_api.schemas.completions import CompletionRequest
from openai_api.schemas.embeddings import EmbeddingRequest
from openai_api.schemas.response_answers import (
    CompactedResponse,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from openai_api.schemas.responses import CompactRequest, ItemsRequest, ResponseRequest
from runtime.requests.bounds import within
from runtime.service.operation import (
    FORM,
    JSON,
    OPERATION_KEY,
    Operation,
    Query,
    events_of,
    json_of,
    operation,
)

Handler = Callable[[Call, OpenAIContext], Awaitable[Reply]]


@dataclass(frozen=True)
class Endpoint:
    """One route of the API, with its handler and its description.

    Attributes:
        method: the HTTP method.
        path: the path, with named parts in braces.
        handler: module and name of a `Handler`, which is imported on use.
        summary: what the route does, for the OpenAPI document.
        documented: the route's requests and answers, for the OpenAPI document.
    """

    method: str
    path: str
    handler: str
    summary: str
    documented: dict[str, Any]

    @property
    def takes_json(self) -> bool:
        """Whether the endpoint has a JSON body."""
        said: Operation = self.documented[OPERATION_KEY]
        return said.body is not None and said.media == JSON


Order = Literal["asc", "desc"]
_PURPOSE = Query("purpose", Literal["batch", "batch_output"], "of the files")


def _paged(most: int) -> tuple[Query, ...]:
    return (
        Query("after", str, "id of the last item of the previous page"),
        Query("limit", Annotated[int, msgspec.Meta(ge=1, le=most)], "most items"),
    )


_CHAT = operation(
    ChatCompletionRequest,
    ok={**json_of(ChatCompletion), **events_of(ChatCompletionChunk, StreamedErrorBody)},
    mentions=(Tool, FunctionSpec),
    refuses=(404,),
)

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "openai_api.endpoints.chat_completions:create_chat_completion",
        "Answer a conversation",
        _CHAT,
    ),
    # Amazon SageMaker sends its clients' requests to this path.
    Endpoint(
        "POST",
        "/invocations",
        "openai_api.endpoints.chat_completions:create_chat_completion",
        "Answer a conversation, for SageMaker",
        _CHAT,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        "openai_api.endpoints.completions:create_completion",
        "Continue a text",
        operation(
            CompletionRequest,
            ok={**json_of(Completion), **events_of(CompletionChunk, StreamedErrorBody)},
            refuses=(404,),
        ),
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        "openai_api.endpoints.embeddings:create_embeddings",
        "Embed texts",
        operation(EmbeddingRequest, ok=json_of(EmbeddingList)),
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        "openai_api.endpoints.responses:create_response",
        "Create a response to input items",
        operation(ResponseRequest, ok={**json_of(ResponseObject), **events_of(ResponseEvent)}),
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        "openai_api.endpoints.responses:count_input_tokens",
        "Count the tokens of items",
        operation(ItemsRequest, ok=json_of(InputTokens)),
    ),
    Endpoint(
        "POST",
        "/v1/responses/compact",
        "openai_api.endpoints.responses:compact_response",
        "Compact a conversation",
        operation(CompactRequest, ok=json_of(CompactedResponse)),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id:response_id}",
        "openai_api.endpoints.responses:retrieve_response",
        "Retrieve a stored response",
        operation(
            ok={**json_of(ResponseObject), **events_of(ResponseEvent)},
            refuses=(400, 404),
            query=(
                Query(
                    "stream",
                    bool,
                    "Stream the response's events; it must have background and stream.",
                ),
                Query("starting_after", int, "Number of the last event that was read."),
            ),
        ),
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id:response_id}",
        "openai_api.endpoints.responses:delete_response",
        "Delete a response",
        operation(ok=json_of(DeletedResponse), refuses=(404,)),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id:response_id}/input_items",
        "openai_api.endpoints.responses:list_input_items",
        "List the input items of a response",
        operation(
            ok=json_of(InputItems),
            refuses=(400, 404),
            query=(
                Query("limit", Annotated[int, within(1, MAX_LIMIT)], "Items of a page."),
                Query("order", Literal["asc", "desc"], "The newest first unless asc."),
                Query("after", str, "The id of the last item of the previous page."),
            ),
        ),
    ),
    Endpoint(
        "POST",
        "/v1/responses/{response_id:response_id}/cancel",
        "openai_api.endpoints.responses:cancel_response",
        "Cancel a background response",
        operation(ok=json_of(ResponseObject), refuses=(404,)),
    ),
    Endpoint(
        "POST",
        "/v1/files",
        "openai_api.endpoints.files:upload_file",
        "Upload the input of a batch",
        operation(FileForm, ok=json_of(FileObject), media=FORM),
    ),
    Endpoint(
        "GET",
        "/v1/files",
        "openai_api.endpoints.files:list_files",
        "List the files",
        operation(
            ok=json_of(FileList),
            query=(*_paged(10_000), Query("order", Order, "of their times"), _PURPOSE),
            refuses=(400,),
        ),
    ),
    Endpoint(
        "GET",
        "/v1/files/{file_id:file_id}",
        "openai_api.endpoints.files:retrieve_file",
        "Describe a file",
        operation(ok=json_of(FileObject), refuses=(400, 404)),
    ),
    Endpoint(
        "GET",
        "/v1/files/{file_id:file_id}/content",
        "openai_api.endpoints.files:file_content",
        "Download a file",
        operation(ok={"application/octet-stream": (str,)}, refuses=(400, 404)),
    ),
    Endpoint(
        "DELETE",
        "/v1/files/{file_id:file_id}",
        "openai_api.endpoints.files:delete_file",
        "Delete a file",
        operation(ok=json_of(DeletedFile), refuses=(400, 404)),
    ),
    Endpoint(
        "POST",
        "/v1/batches",
        "openai_api.endpoints.batches:create_batch",
        "Create a batch from the requests in a file",
        operation(BatchRequest, ok=json_of(BatchObject), refuses=(400, 404)),
    ),
    Endpoint(
        "GET",
        "/v1/batches",
        "openai_api.endpoints.batches:list_batches",
        "List the batches",
        operation(ok=json_of(BatchList), query=_paged(100), refuses=(400,)),
    ),
    Endpoint(
        "GET",
        "/v1/batches/{batch_id:batch_id}",
        "openai_api.endpoints.batches:retrieve_batch",
        "Describe a batch",
        operation(ok=json_of(BatchObject), refuses=(400, 404)),
    ),
    Endpoint(
        "POST",
        "/v1/batches/{batch_id:batch_id}/cancel",
        "openai_api.endpoints.batches:cancel_batch",
        "Cancel a batch",
        operation(ok=json_of(BatchObject), refuses=(400, 404)),
    ),
    Endpoint(
        "GET",
        "/v1/models",
        "openai_api.endpoints.models:list_models",
        "List the models",
        operation(ok=json_of(ModelList)),
    ),
    Endpoint(
        "POST",
        "/v1/classify",
        "openai_api.endpoints.classify:create_classification",
        "Classify texts",
        operation(ClassifyRequest, ok=json_of(Classification)),
    ),
    Endpoint(
        "GET",
        "/v1/models/{model_id:path}",
        "openai_api.endpoints.models:retrieve_model",
        "Describe a model",
        operation(ok=json_of(ModelCard), refuses=(404,)),
    ),
)
