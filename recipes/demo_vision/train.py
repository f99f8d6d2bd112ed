"""Train the vision demo model: `python -m recipes.demo_vision.train --out DIR [--minutes 7]`."""

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from recipes.demo_model.muon import Muon
from recipes.demo_model.train import learning_rate
from recipes.demo_vision.card import write_card
from recipes.demo_vision.evaluate import all_cases, load_network, score, table_of
from recipes.demo_vision.feed import Pool, SampleWriter, to_batch
from recipes.demo_vision.network import Batch, VisionNetwork, loss_of
from recipes.demo_vision.rows import ONE, TWO, Layout, RowWriter
from recipes.demo_vision.samples import one_picture, two_pictures
from recipes.demo_vision.shape import (
    TEMPLATE_PATH,
    TINY,
    VisionShape,
    config_json,
    generation_json,
    preprocessor_json,
    tokenizer_json,
    vision_tokenizer,
)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_folder(
    network: VisionNetwork, shape: VisionShape, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write the whole checkpoint in the format of `transformers`; readers never see half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    template = TEMPLATE_PATH.read_text(encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(
        folder / "tokenizer_config.json", tokenizer_json(template, shape.max_position_embeddings)
    )
    _write(folder / "config.json", config_json(shape, tokenizer))
    _write(folder / "generation_config.json", generation_json(tokenizer))
    _write(folder / "preprocessor_config.json", preprocessor_json())
    part = folder / "model.part"
    save_file(network.checkpoint_weights(), str(part), metadata={"format": "pt"})
    part.chmod(0o644)
    part.rename(folder / "model.safetensors")


class Trainer:
    """The network with its two optimizers."""

    def __init__(self, shape: VisionShape, device: str, rate: float) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.network = VisionNetwork(shape, dtype).to(device)
        self.device, self._rate = device, rate
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self.network.named_parameters():
            hidden = parameter.dim() == 2 and "embed_tokens" not in name
            (matrices if hidden else others).append(parameter)
        self._muon = Muon(matrices, momentum=0.95, decay=0.02)
        self._adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)

    # Gradients are switched on again, because a worker in the same process has switched them off.
    @torch.enable_grad()
    def step(self, batch: Batch, rate: float) -> Tensor:
        """One update; returns the mean loss per learned token, on the device."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            total, count = loss_of(self.network, batch)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._muon.step(self._rate * rate)
        for group in self._adam.param_groups:
            group["lr"] = 3e-3 * rate
        self._adam.step()
        self.network.zero_grad(set_to_none=True)
        return loss.detach()


class Probe:
    """Held-out rows, and the share of answers whose every token is the most probable one."""

    def __init__(self, layout: Layout, sample: SampleWriter, window: int, rows: int) -> None:
        """Draw `rows` rows."""
        writer = RowWriter(vision_tokenizer(), layout, window)
        rng, self._rows = Random("probe"), []
        for _ in range(rows):
            row = writer.empty()
            sample(rng, writer, row)
            self._rows.append(row)

    @torch.inference_mode()
    def measure(self, network: VisionNetwork, device: str) -> tuple[float, float]:
        """Loss per token, and the share of questions answered correctly."""
        right: dict[bool, int] = defaultdict(int)
        loss, tokens = 0.0, 0
        for begin in range(0, len(self._rows), 256):
            batch = to_batch(self._rows[begin : begin + 256], device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = network.at_targets(batch).float()
            target = batch["target"].long()
            kept = target >= 0
            loss += float(
                torch.nn.functional.cross_entropy(logits[kept], target[kept], reduction="sum")
            )
            tokens += int(kept.sum())
            wrong = (logits.argmax(-1) != target) & kept
            rows = torch.arange(len(target), device=device)[:, None]
            question = (rows * 256 + batch["question"].long())[kept]
            asked = question.unique()
            failed = question[wrong[kept]].unique()
            right[True] += len(asked) - len(failed)
            right[False] += len(failed)
        return loss / max(1, tokens), right[True] / max(1, sum(right.values()))


def _pools(args: argparse.Namespace, shape: VisionShape) -> tuple[Pool, Pool]:
    """Workers for both layouts, a fifth of them for two pictures."""
    workers: int = args.workers or max(2, (os.cpu_count() or 2) - 1)
    second = max(1, round(workers * 0.2))
    return (
        Pool(ONE, one_picture, max(1, workers - second), args.seed * 2 + 1, shape.window),
        Pool(TWO, two_pictures, second, args.seed * 2 + 2, shape.window),
    )


class Clock:
    """How much of the training time has passed."""

    def __init__(self, minutes: float, steps: int) -> None:
        self._begin, self._seconds, self._steps = time.monotonic(), minutes * 60, steps

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def progress(self, step: int) -> float:
        """Progress from 0 to 1, by time, or by steps if their number is given."""
        return step / self._steps if self._steps else self.elapsed / self._seconds


def train(args: argparse.Namespace) -> list[float]:
    """Run the recipe; returns the loss of each report (of every step with --tiny)."""
    torch.manual_seed(args.seed)
    started = time.monotonic()
    shape = TINY if args.tiny else VisionShape()
    folder = Path(args.out)
    tokenizer = vision_tokenizer()
    pools = _pools(args, shape)
    try:
        return _train(args, shape, tokenizer, folder, pools, started)
    finally:
        for pool in pools:
            pool.close()


def _train(
    args: argparse.Namespace,
    shape: VisionShape,
    tokenizer: Tokenizer,
    folder: Path,
    pools: tuple[Pool, Pool],
    started: float,
) -> list[float]:
    device: str = args.device
    cuda = device == "cuda"
    if not cuda:
        torch.set_num_threads(2)
    pools[0].open(args.pool, device)
    pools[1].open(args.pool // 6, device)
    trainer = Trainer(shape, device, args.rate)
    if args.resume:
        weights = load_file(Path(args.resume) / "model.safetensors")
        trainer.network.load_checkpoint(weights)
    parameters = sum(tensor.numel() for tensor in trainer.network.checkpoint_weights().values())
    print(f"{parameters:,} parameters on {device}", flush=True)
    rows = (args.rows, max(1, args.rows * 3 // 8))
    probes = (
        Probe(ONE, one_picture, shape.window, args.probe),
        Probe(TWO, two_pictures, shape.window, args.probe // 2),
    )
    cases = all_cases(args.seed, args.cases)
    pools[0].wait(min(args.pool, 8 * args.rows))
    pools[1].wait(min(args.pool // 6, 4 * rows[1]))
    print(f"first rows and {len(cases)} held-out cases after {time.monotonic() - started:.0f} s")
    # Minutes count from the start of the command; the work after training needs some of them.
    spent = time.monotonic() - started
    clock = Clock((args.minutes * 60 - spent) / 60 - args.reserve / 60, args.steps)
    step, seen, losses, reported, saved = 0, 0, [], -1e9, 0.0
    while (progress := clock.progress(step)) < 1:
        # Every fourth step uses rows with two pictures.
        which = step % 4 == 3
        batch = pools[which].batch(rows[which])
        loss = trainer.step(batch, learning_rate(progress))
        seen += rows[which]
        step += 1
        if cuda and step % 8 == 0:
            # Keep the device at most a few steps behind the host.
            torch.cuda.current_stream().synchronize()
        if args.tiny or clock.elapsed - reported >= args.report:
            reported = clock.elapsed
            losses.append(float(loss))
            measured = [probe.measure(trainer.network, device) for probe in probes]
            print(
                f"{reported:.0f} s step {step} loss {losses[-1]:.4f} held out "
                + " ".join(f"{one:.4f} right {100 * share:.1f}%" for one, share in measured)
                + f" | {seen / max(1e-9, clock.elapsed):,.0f} rows/s trained, "
                f"{(pools[0].made + pools[1].made) / (time.monotonic() - started):,.0f} made",
                flush=True,
            )
        if clock.elapsed - saved >= args.save:
            saved = clock.elapsed
            save_folder(trainer.network, shape, tokenizer, folder)
    save_folder(trainer.network, shape, tokenizer, folder)
    print(f"{step} steps, {seen:,} rows in {time.monotonic() - started:.0f} s", flush=True)
    network = load_network(folder, shape, device)
    result = score(network, tokenizer, cases, shape.window, device)
    name = torch.cuda.get_device_name() if cuda else "a CPU"
    result["training"] = {"device": name, "minutes": args.minutes, "steps": step, "rows": seen}
    _write(folder / "eval.json", result)
    write_card(folder, result)
    print(table_of(result))
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)
    return losses


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--out", required=True, help="folder of the checkpoint")
    found.add_argument("--tiny", action="store_true", help="a very small model, for a test")
    found.add_argument("--minutes", type=float, default=7.0, help="wall time of the whole command")
    found.add_argument("--reserve", type=float, default=30.0, help="seconds of it for the score")
    found.add_argument("--steps", type=int, default=0, help="number of steps, instead of minutes")
    found.add_argument("--resume", default="", help="a checkpoint to begin from")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--workers", type=int, default=0, help="processes that draw")
    found.add_argument("--rows", type=int, default=512, help="rows of a step")
    found.add_argument("--rate", type=float, default=0.02, help="Muon's")
    found.add_argument("--pool", type=int, default=98_304, help="rows kept on the device")
    found.add_argument("--cases", type=int, default=150, help="of each kind, for the score")
    found.add_argument("--probe", type=int, default=512, help="held-out rows for reports")
    found.add_argument("--report", type=float, default=20.0, help="seconds between reports")
    found.add_argument("--save", type=float, default=60.0, help="seconds between checkpoints")
    return found


if __name__ == "__main__":
    train(parser().parse_args())
