"""The smallest program: start an engine, ask once, shut it down. It needs no `__main__` guard."""

import headrace as sgl

llm = sgl.Engine(model_path="demo")
answer = llm.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 16})
print(answer["text"])
llm.shutdown()
