"""Runs Headrace as a worker of NVIDIA Dynamo, whose frontend then serves HTTP and routes requests.

    python -m headrace.dynamo --model-path DIR --discovery-backend file

docs/dynamo.md says more. The package `ai-dynamo-runtime`, with `ai-dynamo` installed without its
dependencies, must be there.
"""
