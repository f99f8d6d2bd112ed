"""Run four hundred requests at once from one event loop, then stream another."""

import asyncio

import headrace as sgl
from headrace.demo import MODEL_PATH


async def main() -> None:
    llm = sgl.Engine(model_path=str(MODEL_PATH))
    params = {"temperature": 0, "max_new_tokens": 16}
    tasks = [
        asyncio.create_task(llm.async_generate(f"{left} + {right} =", {**params, "stop": "."}))
        for left in range(20)
        for right in range(20)
    ]
    answers = await asyncio.gather(*tasks)
    print(f"{len(answers)} answers, the first:{answers[0]['text']}")
    async for chunk in await llm.async_generate("The capital of Japan is", params, stream=True):
        print(chunk["text"], end="", flush=True)
    print()
    llm.shutdown()


asyncio.run(main())
