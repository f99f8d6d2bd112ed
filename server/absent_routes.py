"""Hints for clients that call a route of another server's API that this server does not have."""

from __future__ import annotations

_INSTEAD = {
    "/v1/moderations": "texts are not moderated here; /v1/classify gives the classes of a text",
    "/v1/audio": "this server reads and writes text; speech needs another server",
    "/v1/images": "this server does not draw pictures",
    "/v1/videos": "this server does not draw pictures",
    "/v1/evals": "evaluations do not run here; lm-eval and others measure a model: docs/clients.md",
    "/v1/containers": "this server does not run code for a model",
    "/v1/realtime": "answers are streamed over HTTP: /v1/responses or chat, with stream",
    "/v1/uploads": "a file comes in one piece, at /v1/files",
    "/v1/fine_tuning": "the routes in docs/rl.md change weights",
    "/v1/assistants": "conversations are kept by /v1/responses with previous_response_id",
    "/v1/threads": "conversations are kept by /v1/responses with previous_response_id",
    "/v1/conversations": "conversations are kept by /v1/responses with previous_response_id",
    "/v1/vector_stores": "vectors come from /v1/embeddings and are not kept",
    "/v1/complete": "the Messages API is at /v1/messages",
    "/v1/load_lora_adapter": "adapters are loaded at /load_lora_adapter",
    "/v1/unload_lora_adapter": "adapters are unloaded at /unload_lora_adapter",
    "/chat/completions": "is /v1 missing in the base URL?",
    "/completions": "is /v1 missing in the base URL?",
    "/embeddings": "is /v1 missing in the base URL?",
    "/models": "is /v1 missing in the base URL?",
    "/responses": "is /v1 missing in the base URL?",
    "/messages": "the Messages API is at /v1/messages",
    "/v1/v1": "/v1 comes twice: Anthropic's clients add it to the base URL",
}


def instead_of(path: str) -> str | None:
    """Return a hint what to use instead of the unknown `path`; None if there is none."""
    for begin, hint in _INSTEAD.items():
        if path == begin or path.startswith(f"{begin}/"):
            return hint
    return None
