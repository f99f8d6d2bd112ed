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
        "Answer a conversation, in Ollama's words",
        operation(
            OllamaChatRequest, ok={**json_of(ChatLine), **lines_of(ChatLine, OllamaErrorBody)}
        ),
    ),
    Endpoint(
        "POST",
        "/api/generate",
        "ollama_api.ollama_endpoints:generate",
        "Answer a prompt, in Ollama's words",
        operation(
            OllamaGenerateRequest,
            ok={**json_of(GenerateLine), **lines_of(GenerateLine, OllamaErrorBody)},
        ),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        "ollama_api.ollama_embed:create_embeddings",
        "Vectors of texts, in Ollama's words",
        operation(OllamaEmbedRequest, ok=json_of(Embeddings)),
    ),
    Endpoint(
        "POST",
        "/api/embeddings",
        "ollama_api.ollama_embed:create_old_embedding",
        "A text's vector, in Ollama's former words",
        operation(OllamaEmbeddingsRequest, ok=json_of(OldEmbedding)),
    ),
    Endpoint(
        "GET",
        "/api/tags",
        "ollama_api.ollama_models:list_tags",
        "The models that may be named",
        operation(ok=json_of(ModelTags)),
    ),
    Endpoint(
        "GET",
        "/api/ps",
        "ollama_api.ollama_models:list_tags",
        "The models that run",
        operation(ok=json_of(ModelTags)),
    ),
    Endpoint(
        "POST",
        "/api/show",
        "ollama_api.ollama_models:show",
        "What a model is",
        operation(ShowRequest, ok=json_of(ShownModel)),
    ),
    Endpoint(
        "GET",
        "/api/version",
        "ollama_api.ollama_models:version",
        "Whose wire this is",
        operation(ok=json_of(OllamaVersion)),
    ),
)
