"""Where a step's time goes: kernels of a step by GPU time, the gaps between them, and the host's share.

usage: python scripts/gpu/profile_step.py MODELDIR [batch …] [--temperature T] [--context N] [--prompt N]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from random_requests import RandomRequests

STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("batch", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=0, help="a prompt of so many tokens beside the decodes of each step")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    requests = RandomRequests(args.model, temperature=args.temperature, backend=args.backend)
    for batch in args.batch:
        profile(requests, batch, args.context, args.prompt)
    print(f"graphs: {list(requests.llm.executor.runner.graphs.pool.steps)}")


def profile(requests: RandomRequests, batch: int, context: int, prompt: int) -> None:
    def step() -> None:
        if prompt:
            requests.add(prompt, 1)
        requests.step()

    for _ in range(batch):
        requests.add(context, 3 * STEPS + 60)
    requests.step(-(-batch * context // 8192) + 25)  # past every prompt
    for _ in range(4 if prompt else 0):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begun) / STEPS * 1e6
    took, gap = step_and_gap(requests, step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.self_device_time_total)
    total = sum(sum(v) for v in times.values()) / STEPS
    print(
        f"== batch {batch}, context {context}, prompt {prompt}, temperature {requests.temperature}: {wall:.0f} us a step; on the GPU "
        f"{took:.0f} us from its first kernel to its last, {gap:.0f} us from there to the next (medians); "
        f"kernels' times together {total:.0f} us"
    )
    for name, values in sorted(times.items(), key=lambda kv: -sum(kv[1]))[:18]:
        print(f"{sum(values) / STEPS:9.1f} us  {len(values) / STEPS:6.1f} x {sum(values) / len(values):7.2f}  {name[:90]}")
    requests.end_all()


def step_and_gap(requests: RandomRequests, step: Callable[[], None]) -> tuple[float, float]:
    """Medians in microseconds: a captured step on the GPU, and what passes between two of them."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    pool = requests.llm.executor.runner.graphs.pool
    run = pool.run

    def marked(key, body):  # noqa: ANN001, ANN202
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        output = run(key, body)
        after.record()
        marks.append((before, after))
        return output

    pool.run = marked
    for _ in range(STEPS):
        step()
    pool.run = run
    torch.cuda.synchronize()
    took = sorted(before.elapsed_time(after) for before, after in marks)
    gaps = sorted(first[1].elapsed_time(second[0]) for first, second in zip(marks[1:], marks[2:], strict=False))
    return took[len(took) // 2] * 1e3, gaps[len(gaps) // 2] * 1e3


if __name__ == "__main__":
    main()
