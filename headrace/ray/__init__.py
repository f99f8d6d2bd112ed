"""Runs Headrace on Ray: as replicas behind Ray Serve, or for the prompts of a Ray Data dataset.

    from ray import serve
    from headrace.ray import build_app

    serve.run(build_app({"model_path": "demo-toy"}, num_replicas=2))

Or, without a script, `serve run headrace.ray:app model_path=demo-toy`. docs/ray.md says more. Ray
comes with `pip install 'headrace[ray]'`.
"""

from headrace.ray.data import Answers
from headrace.ray.deployment import app, build_app

__all__ = ["Answers", "app", "build_app"]
