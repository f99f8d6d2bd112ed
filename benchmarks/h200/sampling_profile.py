"""Profiles sampling on a GPU, kernel by kernel."""

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.h200.sampling import SETTINGS, make_logits, make_rows
from kernels.sampling import SAMPLING


def main() -> None:
    ops = SAMPLING.load("triton")
    for batch, vocab in ((256, 128256), (1, 151936)):
        logits = make_logits(batch, vocab, True)
        for name in ("top-k 50", "top-p 0.9", "top-k 50, top-p 0.9"):
            rows = make_rows(batch, *SETTINGS[name])
            ops.sample(logits, rows)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(5):
                    ops.sample(logits, rows)
                torch.cuda.synchronize()
            parts = [
                f"{event.key.split('_kernel')[0]} {event.self_device_time_total / 5:.1f}"
                for event in prof.key_averages()
            ]
            print(batch, name, *parts, sep="; ")


if __name__ == "__main__":
    main()
