"""Who may call what: bearer keys, decided by the raw path, closed unless a table opens it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import json_response

OPEN_PATHS = frozenset(
    {"/health", "/health_generate", "/livez", "/readyz", "/ready", "/startupz", "/metrics"}
)
# Routes that change the server or everybody's requests: the admin key where there is one.
ADMIN_PATHS = frozenset(
    {
        *("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation"),
        *("/start_profile", "/stop_profile", "/set_internal_state", "/slow_down", "/freeze_gc"),
        *("/configure_logging", "/load_lora_adapter", "/unload_lora_adapter"),
        *("/load_lora_adapter_from_tensors", "/release_memory_occupation"),
        *("/resume_memory_occupation", "/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weights_from_ipc", "/begin_weight_update"),
        *("/end_weight_update", "/init_weights_update_group", "/destroy_weights_update_group"),
        *("/update_weight_version", "/weights_checker", "/get_weights_by_name"),
        *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
        "/dump_expert_distribution_record",
    }
)


class AuthMiddleware:
    """Answers 401 or 403 itself; what passes is allowed."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, admin_api_key: str | None, root_path: str = ""
    ) -> None:
        """Keep digests only: comparing them takes the same time whatever the client sent."""
        self._app = app
        self._api_digest = _digest(api_key.encode()) if api_key else None
        self._admin_digest = _digest(admin_api_key.encode()) if admin_api_key else None
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No route speaks WebSocket, and none shall without a decision here.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        status_code = self._decide(scope)
        if status_code == 200:
            await self._app(scope, receive, send)
        elif status_code == 403:
            await json_response({"error": "Forbidden"}, 403)(scope, receive, send)
        else:
            refusal = json_response({"error": "Unauthorized"}, 401, www_authenticate="Bearer")
            await refusal(scope, receive, send)

    def _decide(self, scope: Scope) -> int:
        path = scope["path"].removeprefix(self._root_path)
        if scope["method"] == "OPTIONS":
            return 200
        # Reading only: a route whose path the operator names must not become open by its name.
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return 200
        is_admin_path = path in ADMIN_PATHS
        if is_admin_path and self._admin_digest is not None:
            required = self._admin_digest
        elif self._api_digest is not None:
            required = self._api_digest
        else:
            return 200
        digest = _digest(_sent_key(scope, path))
        if hmac.compare_digest(digest, required):
            return 200
        known = self._api_digest is not None and hmac.compare_digest(digest, self._api_digest)
        return 403 if known else 401


def _sent_key(scope: Scope, path: str) -> bytes:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values and path.startswith("/v1/messages"):
        # Anthropic's clients send their key in a header of their own.
        values = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
