"""Ollama's routes: a table of endpoints."""

from __future__ import annotations

from ollama_api.ollama_answers import (
    ChatLine,
    GenerateLine,
    ModelTags,
    OllamaErrorBody,
    OllamaVersion,
    ShownModel,
)
from ollama_api.ollama_request import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from openai_api.operation import json_of, lines_of, operation
from openai_api.router import Endpoint

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
