"""A custom web server around an engine that lives as long as the application.

    python examples/engine/custom_server.py --port 8000
    curl -N -d '{"prompt": "The capital of France is"}' http://127.0.0.1:8000/generate_stream

When a client disconnects, its stream is closed, which aborts the request.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

import headrace as sgl
from headrace.demo import MODEL_PATH


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with sgl.Engine(model_path=str(MODEL_PATH)) as app.state.engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(request: Request) -> dict[str, str]:
    prompt = (await request.json())["prompt"]
    answer = await request.app.state.engine.async_generate(prompt, {"temperature": 0})
    return {"text": answer["text"]}


@app.post("/generate_stream")
async def generate_stream(request: Request) -> StreamingResponse:
    prompt = (await request.json())["prompt"]
    engine = request.app.state.engine
    chunks = await engine.async_generate(prompt, {"temperature": 0}, stream=True)

    async def texts() -> AsyncIterator[str]:
        async for chunk in chunks:
            yield chunk["text"]

    return StreamingResponse(texts(), media_type="text/plain")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")
