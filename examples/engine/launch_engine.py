"""The smallest program: it starts an engine, asks once and shuts the engine down, without a guard."""

import headrace as sgl

llm = sgl.Engine(model_path="demo")
answer = llm.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 16})
print(answer["text"])
llm.shutdown()
