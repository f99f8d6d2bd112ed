"""SGLang's back ends that are not supported; creating one raises an error that names another."""

from __future__ import annotations

from typing import Any, NoReturn

from headrace.lang.backend.base import BaseBackend


class VertexAI(BaseBackend):
    """Raises an error that says how to use Vertex AI through the back end `OpenAI`."""

    def __init__(self, model_name: str, *_: Any, **__: Any) -> None:
        """Raise an error with the arguments for `OpenAI`.

        Raises:
            NotImplementedError: always.
        """
        _refer(
            f"VertexAI({model_name!r}): use OpenAI('google/{model_name}', base_url='https://"
            "LOCATION-aiplatform.googleapis.com/v1/projects/PROJECT/locations/LOCATION/endpoints/"
            f"openapi', api_key=TOKEN), or LiteLLM('vertex_ai/{model_name}')."
        )


class Crusoe(BaseBackend):
    """Raises an error that says how to use Crusoe through the back end `OpenAI`."""

    def __init__(self, model_name: str, *_: Any, **__: Any) -> None:
        """Raise an error with the arguments for `OpenAI`.

        Raises:
            NotImplementedError: always.
        """
        _refer(
            f"Crusoe({model_name!r}): use OpenAI({model_name!r}, base_url=..., api_key=os.environ"
            "['CRUSOE_API_KEY']) with the address that your Crusoe console shows."
        )


def _refer(advice: str) -> NoReturn:
    raise NotImplementedError(f"There is no separate back end for {advice}")
