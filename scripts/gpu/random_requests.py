"""Requests of random tokens, put straight into an offline engine whose steps are then called one by one."""

from __future__ import annotations

import random

from octavo import LLM, SamplingParams
from octavo.frontend.inputs import parse_prompts


class RandomRequests:
    """``llm``'s engine, with dummy weights and no prefix cache."""

    def __init__(self, folder: str, *, temperature: float = 0.0, seed: int = 0, backend: str = "auto") -> None:
        self.llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, attention_backend=backend,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.temperature, self.rng = temperature, random.Random(seed)
        self.vocab_size = self.llm.executor.runner.vocab_size

    def add(self, length: int, max_tokens: int) -> None:
        """A prompt of ``length`` tokens, answered by ``max_tokens``."""
        prompt = {"prompt_token_ids": [self.rng.randrange(10, self.vocab_size) for _ in range(length)]}
        params = SamplingParams(temperature=self.temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.llm.engine.add_request(self.llm._request(parse_prompts(prompt, None)[0], params, 0))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.llm.engine.step()

    def end_all(self) -> None:
        self.llm.engine.abort_all()
        while self.llm.engine.has_work():
            self.llm.engine.step()
