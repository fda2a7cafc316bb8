"""The least time that work can take on a GPU: bytes that must move over its bandwidth, arithmetic over its rate, the larger of both,
for the matrix products and for attention, which run one after the other.

Counted: every weight once a step (the input embedding not, the output head yes), every cached K and V once a step, matrix products and
attention. Not counted: activations, launches, sampling, the host. So no engine reaches a floor, and ratios to it compare loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BANDWIDTH = 4.3e12  # bytes a second: a device-to-device copy on one H200, reads and writes counted
FLOPS = 790e12  # a bf16 matrix product of 8,192 cubed there
Length = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True)
class Floor:
    """One dense decoder on one GPU. Sizes are counts of numbers; ``width`` is bytes a number, of weights and of K and V."""

    layers: int
    body: int  # weights of all layers
    head: int  # of the output head
    q_size: int  # query heads x head size
    kv_size: int  # key heads x head size
    width: int = 2
    bandwidth: float = BANDWIDTH
    flops: float = FLOPS

    @classmethod
    def of_config(cls, config: dict[str, Any], **machine: float) -> Floor:
        """From a Llama-like config.json; other families' layers are counted as if they were."""
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        q, kv = heads * size, config.get("num_key_value_heads", heads) * size
        layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config["intermediate_size"]
        width = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
        return cls(layers, layers * layer, config["vocab_size"] * hidden, q, kv, width, **machine)  # type: ignore[arg-type]

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's K and V in all layers."""
        return 2 * self.layers * self.kv_size * self.width

    def _linear_s(self, rows: float, head_rows: float) -> float:
        """The matrix products of a step of ``rows`` tokens, of which ``head_rows`` get logits."""
        moved, operations = (self.body + self.head) * self.width, 2 * (self.body * rows + self.head * head_rows)
        return max(moved / self.bandwidth, operations / self.flops)

    def _attention_s(self, read: float, pairs: float) -> float:
        """Attention that reads the K and V of ``read`` tokens, for ``pairs`` of a query's token and a key's."""
        return max(read * self.kv_bytes / self.bandwidth, 4 * self.layers * self.q_size * pairs / self.flops)

    def decode_s(self, batch: float, context: float) -> float:
        """One step of ``batch`` sequences that have ``context`` tokens each."""
        return self._linear_s(batch, batch) + self._attention_s(batch * context, batch * context)

    def prefill_s(self, prompts: int, length: int, cached: int = 0) -> float:
        """``prompts`` of ``length`` tokens each, of which the first ``cached`` have K and V already; one token comes out of each."""
        new = length - cached
        return self._linear_s(prompts * new, prompts) + self._attention_s(prompts * length, prompts * new * (cached + (new + 1) / 2))

    def added_prefill_s(self, length: int) -> float:
        """What a prompt adds to steps that run anyhow: its arithmetic."""
        return (2 * self.body * length + 4 * self.layers * self.q_size * length * (length + 1) / 2) / self.flops

    def mixed_s(self, lengths: Sequence[Length], max_seqs: int | None = None) -> float:
        """All requests at once, run to the end, ``max_seqs`` at a time: each prompt's arithmetic, and decode steps that read the
        weights once for all who run. Prompts are free riders of a step's weights."""
        waiting = list(reversed(lengths))
        running: list[list[int]] = []  # context, tokens left
        total = 0.0
        while waiting or running:
            while waiting and (max_seqs is None or len(running) < max_seqs):
                n_in, n_out = waiting.pop()
                total += self.added_prefill_s(n_in)
                running.append([n_in, n_out])
            steps = min(left for _, left in running)
            if waiting or steps > 8:
                steps = min(steps, 8)  # contexts grow on the way: in small strides
            context = sum(c for c, _ in running) / len(running) + steps / 2
            total += steps * self.decode_s(len(running), context)
            running = [[c + steps, left - steps] for c, left in running if left > steps]
        return total

    def serving_tok_s(self, concurrency: int, n_in: int, n_out: int) -> float:
        """Output tokens a second with ``concurrency`` requests in flight at any time."""
        decode = n_out * self.decode_s(concurrency, n_in + n_out / 2)
        return concurrency * n_out / (decode + concurrency * self.added_prefill_s(n_in))
