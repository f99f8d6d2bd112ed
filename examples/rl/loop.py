"""Miniature reinforcement learning: a trainer updates a server's weights during its rollouts.

    python -m server.launch --model-path DIR --dtype float32 --random-seed 1
    python examples/rl/loop.py --model-path DIR

Each round starts eight rollouts. While they run, generation is paused, the server takes the weights
of the previous round through shared memory, and the rollouts continue where they stopped. Then the
trainer and the server must agree on the log-probability of every token, and the trainer takes one
step of REINFORCE. The reward, the share of vowels, is a toy.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from headrace.trainer import SharedTensors

PROMPTS = (
    "The capital of France is",
    "The miller opens the gate",
    "A list of animals:",
    "What is the best way to",
)
NUM_ROLLOUTS = 8
VOWELS = frozenset("aeiouAEIOU")


class Server:
    """The routes that the loop needs."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=300)

    def post(self, path: str, **body: Any) -> Any:
        answer = self._client.post(path, json=body)
        if answer.is_error:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    def rollout(self, index: int, seed: int, num_tokens: int) -> Rollout:
        """One sample with the log-probabilities at which it was drawn."""
        answer = self.post(
            "/generate",
            text=PROMPTS[index % len(PROMPTS)],
            sampling_params={
                "temperature": 1.0,
                "max_new_tokens": num_tokens,
                "sampling_seed": seed,
                "ignore_eos": True,
            },
            return_logprob=True,
            return_prompt_token_ids=True,
        )
        return Rollout(
            answer["prompt_token_ids"],
            answer["output_ids"],
            answer["text"],
            answer["meta_info"]["weight_version"],
            answer["meta_info"]["total_retractions"] > 0,
        )

    def wait_until_running(self, rollouts: list[Future[Rollout]]) -> None:
        """Wait until all requests are generating or the first one has finished."""
        while not any(rollout.done() for rollout in rollouts):
            load = self._client.get("/v1/loads").json()["loads"][0]
            if load["num_running_reqs"] >= len(rollouts):
                return
            time.sleep(0.005)

    def score(self, ids: list[int]) -> torch.Tensor:
        """Log-probability of each token after the first, `[len(ids) - 1]`."""
        answer = self.post(
            "/generate",
            input_ids=ids,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        found = answer["meta_info"]["input_token_logprobs"][1:]
        return torch.tensor([logprob for logprob, _, _ in found])

    def update(self, policy: torch.nn.Module, version: str) -> float:
        """Send the policy's weights to the server while its requests are retracted.

        Returns:
            Seconds without generation.
        """
        with SharedTensors(policy.state_dict()) as shared:
            started = time.perf_counter()
            self.post("/pause_generation", mode="retract")
            try:
                self.post("/update_weights_from_tensor", **shared.body, weight_version=version)
            finally:
                self.post("/continue_generation")
            return time.perf_counter() - started


@dataclass
class Rollout:
    """One generated sample of a prompt.

    Attributes:
        version: version of the weights that generated its last token.
        was_put_back: whether it was running when generation was paused.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    version: str
    was_put_back: bool

    @property
    def reward(self) -> float:
        return sum(letter in VOWELS for letter in self.text) / max(len(self.text), 1)


def logprobs(policy: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The trainer's log-probability of each token after the first, `[len(ids) - 1]`."""
    logits = policy(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def train(policy: torch.nn.Module, rollouts: list[Rollout], rate: float) -> None:
    """One step of REINFORCE with the mean reward as its baseline."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    for rollout, advantage in zip(rollouts, rewards - rewards.mean(), strict=True):
        ids = rollout.prompt_ids + rollout.output_ids
        of_output = logprobs(policy, ids)[len(rollout.prompt_ids) - 1 :]
        (-advantage * of_output.mean() / len(rollouts)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def largest_difference(server: Server, policy: torch.nn.Module, rollouts: list[Rollout]) -> float:
    """The largest difference between server and trainer on any token of the rollouts."""
    found = 0.0
    with torch.no_grad():
        for rollout in rollouts:
            ids = rollout.prompt_ids + rollout.output_ids
            found = max(found, float((server.score(ids) - logprobs(policy, ids)).abs().max()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model-path", required=True, help="the folder that the server serves")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    options = parser.parse_args()
    server = Server(options.url)
    policy = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32)
    for number in range(options.rounds):
        version = f"round-{number}"
        with ThreadPoolExecutor(NUM_ROLLOUTS) as pool:
            futures = [
                pool.submit(server.rollout, index, 1000 * number + index, options.num_tokens)
                for index in range(NUM_ROLLOUTS)
            ]
            server.wait_until_running(futures)
            paused_s = server.update(policy, version)
            rollouts = [future.result() for future in futures]
        apart = largest_difference(server, policy, rollouts)
        reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        updated = sum(each.was_put_back and each.version == version for each in rollouts)
        print(
            f"{version}: reward {reward:.3f}, {updated} of {len(rollouts)} rollouts continued with "
            f"the new weights, paused {1000 * paused_s:.0f} ms, log-probabilities at most "
            f"{apart:.1e} apart",
            flush=True,
        )
        if apart > options.tolerance:
            sys.exit("The server does not have the trainer's weights.")
        train(policy, rollouts, options.learning_rate)


if __name__ == "__main__":
    main()
