"""Checks sampling on an H200 against a float64 version, and compares its time with FlashInfer's."""

from dataclasses import replace

import torch

from benchmarks.h200.timing import graph_us
from kernels.sampling import SAMPLING, SamplingRows
from kernels.sampling.draw import uniform

DEVICE = torch.device("cuda")
SHAPES = ((256, 128256), (64, 151936), (1, 151936), (1, 128256))
# Microseconds of FlashInfer 0.6.14 for top-k and top-p on the same kind of GPU.
PEER_US = {(256, 128256): 154}
SETTINGS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, -1, 1.0, 0.0),
    "temperature": (0.8, -1, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (0.8, -1, 0.9, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-k 20, top-p 0.95, min-p 0.05": (0.6, 20, 0.95, 0.05),
    "min-p 0.1": (1.0, -1, 1.0, 0.1),
}


def make_rows(batch, temperature, top_k, top_p, min_p) -> SamplingRows:
    def full(value, dtype=torch.float32):
        return torch.full((batch,), value, dtype=dtype, device=DEVICE)

    return SamplingRows(
        temperature=full(temperature),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p),
        min_p=full(min_p),
        seed=torch.randint(-(2**62), 2**62, (batch,), device=DEVICE),
        position=torch.randint(0, 9999, (batch,), device=DEVICE),
        all_greedy=temperature == 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        max_top_k=max(top_k, 0),
    )


def make_logits(batch, vocab, peaked: bool) -> torch.Tensor:
    """Return random logits.

    Flat logits are normal with deviation 1. In peaked logits, a few tokens stand out, as in a
    model's output.
    """
    logits = torch.randn(batch, vocab, device=DEVICE)
    if peaked:
        best = torch.randint(0, vocab, (batch, 40), device=DEVICE)
        logits.scatter_add_(1, best, 8 + 8 * torch.rand(batch, 40, device=DEVICE))
    return logits.bfloat16().float()


def expected(logits, rows) -> torch.Tensor:
    """Draw in float64 by sorting, as described in the docstring of `kernels.sampling.sample`."""
    scaled = logits / rows.temperature.unsqueeze(1)
    p = torch.softmax(scaled.double(), -1)
    _, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    ranked = p.gather(1, order)
    vocab = logits.shape[1]
    top_k = torch.where((rows.top_k <= 0) | (rows.top_k > vocab), vocab, rows.top_k).long()
    running = ranked.cumsum(-1)
    mass = torch.where(rows.min_p > 0, running.gather(1, top_k.unsqueeze(1) - 1).squeeze(1), 1.0)
    wanted = torch.where(rows.top_p < 1, rows.top_p.double() * mass, 9.0).unsqueeze(1)
    kept = torch.arange(vocab, device=DEVICE) < top_k.unsqueeze(1)
    kept &= (running - ranked) < wanted
    kept &= ranked >= rows.min_p.unsqueeze(1) * ranked[:, :1]
    kept[:, 0] = True
    survivors = torch.zeros_like(p).scatter_(1, order, ranked * kept)
    sums = survivors.cumsum(-1)
    target = uniform(rows.seed, rows.position).double().unsqueeze(1) * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True).squeeze(1)


def check() -> list[str]:
    """Compare the draws with float64; return the errors.

    A few rows of a thousand may differ, because a draw can fall on the edge between two tokens.
    """
    wrong = []
    ops = SAMPLING.load("triton")
    for batch, vocab in ((64, 32000), (32, 128256), (5, 151936)):
        for peaked in (True, False):
            logits = make_logits(batch, vocab, peaked)
            for name, setting in SETTINGS.items():
                rows = make_rows(batch, *setting)
                torch.cuda.set_sync_debug_mode("error")
                got = ops.sample(logits, rows)
                torch.cuda.set_sync_debug_mode("default")
                want = logits.argmax(-1) if setting[0] == 0 else expected(logits, rows)
                differ = int((got != want).sum())
                if differ > batch // 32:
                    wrong.append(f"sample {batch}x{vocab} peaked={peaked} {name}: {differ} differ")
                # A row must draw the same token alone as in the batch.
                columns = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
                alone = replace(rows, **{c: getattr(rows, c)[3:4] for c in columns})
                if ops.sample(logits[3:4], alone) != got[3]:
                    wrong.append(f"sample {batch}x{vocab} peaked={peaked} {name}: alone differs")
            for top_k in (0, 1, 20):
                ids = torch.randint(0, vocab, (batch, 3), device=DEVICE)
                torch.cuda.set_sync_debug_mode("error")
                chosen, values, top_ids = ops.gather_logprobs(logits, ids, top_k)
                torch.cuda.set_sync_debug_mode("default")
                logprobs = torch.log_softmax(logits.double(), -1)
                order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
                ok = torch.allclose(chosen.double(), logprobs.gather(1, ids), atol=1e-5)
                ok &= torch.equal(top_ids, order[:, :top_k])
                ok &= torch.allclose(
                    values.double(), logprobs.gather(1, order[:, :top_k]), atol=1e-5
                )
                if not ok:
                    wrong.append(f"logprobs {batch}x{vocab} peaked={peaked} top {top_k}")
    return wrong + check_edits()


def check_edits() -> list[str]:
    wrong = []
    ours, theirs = SAMPLING.load("triton"), SAMPLING.load("reference")
    logits = make_logits(9, 50001, True)
    rows, ids = (torch.randint(0, n, (500,), device=DEVICE) for n in (9, 50001))
    bitmask = torch.randint(-(2**31), 2**31, (9, 1563), device=DEVICE).to(torch.int32)
    for name, arguments in (
        ("apply_logit_bias", (rows, ids, torch.randn(500, device=DEVICE))),
        ("mask_tokens", (rows, ids)),
        ("apply_token_bitmask", (bitmask,)),
    ):
        mine, other = logits.clone(), logits.clone()
        torch.cuda.set_sync_debug_mode("error")
        getattr(ours, name)(mine, *arguments)
        torch.cuda.set_sync_debug_mode("default")
        getattr(theirs, name)(other, *arguments)
        if not torch.allclose(mine, other, atol=1e-5):
            wrong.append(name)
    history = torch.randint(0, 50001, (9, 700), device=DEVICE)
    lens = torch.randint(0, 700, (9,), device=DEVICE)
    factors = [torch.rand(9, device=DEVICE) + 0.5 for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    ours.apply_penalties(logits, history, lens, *factors)
    ours.nan_rows(logits)
    torch.cuda.set_sync_debug_mode("default")
    return wrong


def measure() -> list[dict[str, object]]:
    """Time every setting at every shape, with peaked and with flat logits."""
    table: list[dict[str, object]] = []
    ops = SAMPLING.load("triton")
    for batch, vocab in SHAPES:
        for peaked in (True, False):
            sets = [make_logits(batch, vocab, peaked) for _ in range(2 if batch > 100 else 8)]
            for name, setting in SETTINGS.items():
                rows = make_rows(batch, *setting)
                took = graph_us([lambda x=x, r=rows: ops.sample(x, r) for x in sets])
                peer = PEER_US.get((batch, vocab)) if name == "top-k 50, top-p 0.9" else None
                kind = "peaked" if peaked else "flat"
                row = {"model": f"{batch}", "case": f"x{vocab} {kind} {name}", "us": took}
                table.append({**row, "peer_us": peer})
        ids = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
        for top_k in (0, 5):
            took = graph_us(
                [lambda x=x, i=ids, k=top_k: ops.gather_logprobs(x, i, k) for x in sets]
            )
            row = {"model": f"{batch}", "case": f"x{vocab} logprobs top {top_k}", "us": took}
            table.append(row)
        bitmask = torch.full((batch, -(-vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
        took = graph_us([lambda x=x, m=bitmask: ops.apply_token_bitmask(x, m) for x in sets])
        table.append({"model": f"{batch}", "case": f"x{vocab} bit mask", "us": took})
        took = graph_us([lambda x=x: x.argmax(-1) for x in sets])
        table.append({"model": f"{batch}", "case": f"x{vocab} torch argmax", "us": took})
    return table
