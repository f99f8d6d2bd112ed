"""The same application as for the OpenAI routes."""

from tests.unit.openai_api.conftest import make_front

__all__ = ["make_front"]
