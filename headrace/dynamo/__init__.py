"""Runs Headrace as a worker of NVIDIA Dynamo, whose frontend then serves HTTP and routes requests.

    python -m headrace.dynamo --model-path DIR --discovery-backend file

It needs the package `ai-dynamo-runtime`, and `ai-dynamo` installed without its dependencies.
docs/dynamo.md describes the installation and the options.
"""
