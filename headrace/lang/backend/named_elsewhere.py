"""SGLang's back ends that have no class here: an error names the back end to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from headrace.lang.backend.base import BaseBackend


class VertexAI(BaseBackend):
    """Not a separate back end: Vertex AI speaks OpenAI's API."""

    def __init__(self, model_name: str, *_: Any, **__: Any) -> None:
        """Say what to use.

        Raises:
            NotImplementedError: always.
        """
        _refer(
            f"VertexAI({model_name!r}): use OpenAI('google/{model_name}', base_url='https://"
            "LOCATION-aiplatform.googleapis.com/v1/projects/PROJECT/locations/LOCATION/endpoints/"
            f"openapi', api_key=TOKEN), or LiteLLM('vertex_ai/{model_name}')."
        )


class Crusoe(BaseBackend):
    """Not a separate back end: Crusoe speaks OpenAI's API."""

    def __init__(self, model_name: str, *_: Any, **__: Any) -> None:
        """Say what to use.

        Raises:
            NotImplementedError: always.
        """
        _refer(
            f"Crusoe({model_name!r}): use OpenAI({model_name!r}, base_url=..., api_key=os.environ"
            "['CRUSOE_API_KEY']) with the address that your Crusoe console shows."
        )


def _refer(advice: str) -> NoReturn:
    raise NotImplementedError(f"There is no separate back end for {advice}")
