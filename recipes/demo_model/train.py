"""Train the demo model: `python -m recipes.demo_model.train --out DIR [--minutes 8] [--tiny]`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from recipes.demo_model.data import Block, parallel_blocks
from recipes.demo_model.encode import END_OF_TEXT, END_OF_TURN
from recipes.demo_model.muon import Muon
from recipes.demo_model.network import TINY, Network, Shape, config_json
from recipes.demo_model.render import TEMPLATE_PATH
from recipes.demo_model.train_tokenizer import tokenizer_config, train_tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """Write the tokenizer's two files and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    _write(folder / "tokenizer_config.json", tokenizer_config(template, max_len))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def save_model(network: Network, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights and configuration in the format of `transformers`."""
    folder.mkdir(parents=True, exist_ok=True)
    eos, end = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)
    assert eos is not None, "the tokenizer has no <|im_end|>"
    assert end is not None, "the tokenizer has no <|endoftext|>"
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.named_parameters()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write(folder / "config.json", config_json(shape, eos, end))
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    _write(
        folder / "generation_config.json",
        {"bos_token_id": None, "eos_token_id": [eos, end], "pad_token_id": end, **sampling},
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def learning_rate(progress: float) -> float:
    """Warm up over 2% of the run, stay constant, then fall to zero over the last half."""
    if progress < 0.02:
        return progress / 0.02
    return min(1.0, max(0.0, (1.0 - progress) / 0.5))


class Trainer:
    """The network with its two optimizers."""

    def __init__(self, shape: Shape, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.network = Network(shape, dtype).to(device)
        self.device = device
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self.network.named_parameters():
            hidden = parameter.dim() == 2 and "embed" not in name
            (matrices if hidden else others).append(parameter)
        self._muon = Muon(matrices, momentum=0.95, decay=0.02)
        self._adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)

    # A worker in the same process has switched gradients off.
    @torch.enable_grad()
    def step(self, blocks: list[Block], rate: float) -> Tensor:
        """One update from several blocks; returns the mean loss per learned token, on device."""
        count = sum(int((block.targets >= 0).sum()) for block in blocks)
        total = torch.zeros((), device=self.device)
        for block in blocks:
            ids = torch.from_numpy(block.ids).to(self.device, non_blocking=True).long()
            targets = torch.from_numpy(block.targets).to(self.device, non_blocking=True).long()
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                logits = self.network(ids)
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum"
            )
            (loss / count).backward()
            total += loss.detach() / count
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._muon.step(0.02 * rate)
        for group in self._adam.param_groups:
            group["lr"] = 4e-3 * rate
        self._adam.step()
        self.network.zero_grad(set_to_none=True)
        return total


def train(args: argparse.Namespace) -> list[float]:
    """Run the recipe; returns the loss of every fiftieth step (of every step with --tiny)."""
    torch.manual_seed(args.seed)
    shape = TINY if args.tiny else Shape()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.monotonic()
    folder = Path(args.out)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    else:
        tokenizer = train_tokenizer(shape.vocab_size, count=2_000 if args.tiny else 60_000)
    save_tokenizer(tokenizer, folder, shape.max_position_embeddings)
    print(f"tokenizer of {tokenizer.get_vocab_size()} ids after {time.monotonic() - begin:.0f} s")
    trainer = Trainer(shape, device)
    parameters = sum(parameter.numel() for parameter in trainer.network.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)
    stream = parallel_blocks(tokenizer, args.seed + 1, args.block_tokens, args.workers)
    if args.tiny:
        # Sequences longer than the tiny model's positions are omitted.
        stream = (block for block in stream if block.ids.shape[1] <= shape.max_position_embeddings)
    next(stream)  # Workers take seconds to start; the clock runs from the first block.
    begin, seconds, step, seen, losses = time.monotonic(), args.minutes * 60, 0, 0, []
    while True:
        elapsed = time.monotonic() - begin
        progress = step / args.steps if args.steps else elapsed / seconds
        if progress >= 1:
            break
        batch = [next(stream) for _ in range(args.blocks_per_step)]
        loss = trainer.step(batch, learning_rate(progress))
        seen += sum(block.ids.size for block in batch)
        if args.tiny or step % 50 == 0:
            losses.append(float(loss))
            rate = seen / max(elapsed, 1e-9)
            print(
                f"step {step} {elapsed:.0f} s loss {losses[-1]:.4f} {rate:,.0f} tok/s", flush=True
            )
        step += 1
        if step % 1000 == 0:
            save_model(trainer.network, shape, tokenizer, folder)
    save_model(trainer.network, shape, tokenizer, folder)
    print(f"{step} steps, {seen:,} tokens in {time.monotonic() - begin:.0f} s")
    return losses


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--out", required=True, help="folder of the checkpoint")
    found.add_argument("--tiny", action="store_true", help="a very small model, for a test")
    found.add_argument("--minutes", type=float, default=8.0, help="time to train for")
    found.add_argument("--steps", type=int, default=0, help="number of steps, instead of minutes")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--workers", type=int, default=0, help="processes that make data")
    found.add_argument("--block-tokens", type=int, default=32768)
    found.add_argument("--blocks-per-step", type=int, default=4)
    found.add_argument("--tokenizer", default="", help="a tokenizer.json to use as it is")
    return found


if __name__ == "__main__":
    train(parser().parse_args())
