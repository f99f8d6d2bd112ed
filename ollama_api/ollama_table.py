"""Ollama's routes: a table of endpoints."""

from __future__ import annotations

from ollama_api.ollama_answers import (
    ChatLine,
    Embeddings,
    GenerateLine,
    ModelTags,
    OldEmbedding,
    OllamaErrorBody,
    OllamaVersion,
    ShownModel,
)
from ollama_api.ollama_request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from openai_api.routes import Endpoint
from runtime.service.operation import json_of, lines_of, operation

ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/chat",
        "ollama_api.ollama_endpoints:chat",
        "Answer a conversation, in Ollama's format",
        operation(
            OllamaChatRequest, ok={**json_of(ChatLine), **lines_of(ChatLine, OllamaErrorBody)}
        ),
    ),
    Endpoint(
        "POST",
        "/api/generate",
        "ollama_api.ollama_endpoints:generate",
        "Answer a prompt, in Ollama's format",
        operation(
            OllamaGenerateRequest,
            ok={**json_of(GenerateLine), **lines_of(GenerateLine, OllamaErrorBody)},
        ),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        "ollama_api.ollama_embed:create_embeddings",
        "Return vectors of texts, in Ollama's format",
        operation(OllamaEmbedRequest, ok=json_of(Embeddings)),
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        "ollama_api.ollama_embed:create_old_embedding",
        "Return the vector of a text, in Ollama's older format",
        operation(OllamaEmbeddingsRequest, ok=json_of(OldEmbedding)),
    ),
    Endpoint(
        "GET",
        "/api/tags",
        "ollama_api.ollama_models:list_tags",
        "List the available models",
        operation(ok=json_of(ModelTags)),
    ),
    Endpoint(
        "GET",
        "/api/ps",
        "ollama_api.ollama_models:list_tags",
        "List the running models",
        operation(ok=json_of(ModelTags)),
    ),
    Endpoint(
        "POST",
        "/api/show",
        "ollama_api.ollama_models:show",
        "Describe a model",
        operation(ShowRequest, ok=json_of(ShownModel)),
    ),
    Endpoint(
        "GET",
        "/api/version",
        "ollama_api.ollama_models:version",
        "Return the version of Ollama's API",
        operation(ok=json_of(OllamaVersion)),
    ),
)
