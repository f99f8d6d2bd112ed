"""Start an engine, ask once and shut it down. No `__main__` guard is needed."""

import headrace as sgl

llm = sgl.Engine(model_path="demo")
answer = llm.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 16})
print(answer["text"])
llm.shutdown()
