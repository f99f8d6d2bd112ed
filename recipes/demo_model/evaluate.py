"""Score a checkpoint or a running server with greedy decoding.

`python -m recipes.demo_model.evaluate --model headrace/demo/model --json score.json`, or
`python -m recipes.demo_model.evaluate --url http://127.0.0.1:30000 --json score.json`.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.demo import MODEL_PATH
from recipes.demo_model.eval_cases import Case, all_cases

MAX_TOKENS = 160

Answerer = Callable[[list[Case]], list[str]]


def local_answerer(folder: str, batch_size: int) -> Answerer:
    """Return a function that answers in batches with a checkpoint, by `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    stops = [tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]

    def prompt_of(case: Case) -> str:
        if case.prompt:
            return case.prompt
        switch = {} if case.thinking is None else {"enable_thinking": case.thinking}
        text: str = tokenizer.apply_chat_template(
            case.messages,
            tools=case.tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **switch,
        )
        return text

    @torch.inference_mode()
    def answer(cases: list[Case]) -> list[str]:
        prompts = [prompt_of(case) for case in cases]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found = [""] * len(prompts)
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
            batch.pop("token_type_ids", None)
            ids = model.generate(
                **batch.to(device),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=stops,
            )
            for index, row in zip(chosen, ids[:, batch["input_ids"].shape[1] :], strict=True):
                found[index] = tokenizer.decode(row, skip_special_tokens=True)
        return found

    return answer


def _text_of(message: dict[str, Any]) -> str:
    """Return a chat message as the model wrote it, with reasoning and calls inside the text."""
    text = message.get("content") or ""
    if message.get("reasoning_content"):
        text = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n{text.lstrip()}"
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return text


def server_answerer(url: str, concurrency: int) -> Answerer:
    """Return a function that answers with a server, by its OpenAI API."""
    import httpx

    client = httpx.Client(base_url=url.rstrip("/"), timeout=300)

    def one(case: Case) -> str:
        body: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": MAX_TOKENS}
        if case.prompt:
            response = client.post("/v1/completions", json={**body, "prompt": case.prompt})
            response.raise_for_status()
            return str(response.json()["choices"][0]["text"])
        body["messages"] = [_wire(message) for message in case.messages]
        if case.tools:
            body["tools"] = case.tools
        if case.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": case.thinking}
        response = client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return _text_of(response.json()["choices"][0]["message"])

    def answer(cases: list[Case]) -> list[str]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(one, cases))

    return answer


def _wire(message: dict[str, Any]) -> dict[str, Any]:
    """The message in the OpenAI API's form: calls with ids, and arguments as a string."""
    message = dict(message)
    if message["role"] == "tool":
        message["tool_call_id"] = "call_0"
    if "tool_calls" in message:
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for index, call in enumerate(message["tool_calls"])
        ]
    return message


def score(answer: Answerer) -> dict[str, Any]:
    """Count right answers and totals by skill, and collect every failure."""
    cases = all_cases()
    skills: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    failures = []
    for case, said in zip(cases, answer(cases), strict=True):
        right = case.check(said)
        skills[case.skill][0] += right
        skills[case.skill][1] += 1
        if not right:
            failures.append({"skill": case.skill, "question": case.shown, "answer": said})
    total = [sum(pair[index] for pair in skills.values()) for index in (0, 1)]
    table = {name: {"right": right, "of": count} for name, (right, count) in skills.items()}
    return {"skills": table, "right": total[0], "of": total[1], "failures": failures}


def table_of(result: dict[str, Any]) -> str:
    """The score as a Markdown table."""
    lines = ["| skill | right | of | |", "|---|--:|--:|--:|"]
    rows = [*result["skills"].items(), ("all", result)]
    for name, row in rows:
        share = 100 * row["right"] / row["of"]
        lines.append(f"| {name} | {row['right']} | {row['of']} | {share:.1f}% |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_PATH), help="folder of a checkpoint")
    parser.add_argument("--url", default="", help="a running server, in place of a folder")
    parser.add_argument("--json", default="", help="where to write the score")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--failures", type=int, default=0, help="failures to print per skill")
    args = parser.parse_args()
    answerer = (
        server_answerer(args.url, args.batch_size)
        if args.url
        else local_answerer(args.model, args.batch_size)
    )
    result = score(answerer)
    print(table_of(result))
    shown: dict[str, int] = defaultdict(int)
    for failure in result["failures"]:
        shown[failure["skill"]] += 1
        if shown[failure["skill"]] <= args.failures:
            print(f"- {failure['skill']}: {failure['question']!r} -> {failure['answer']!r}")
    if args.json:
        text = json.dumps(result, indent=1, ensure_ascii=False)
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
