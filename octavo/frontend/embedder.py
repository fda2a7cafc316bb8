"""``LLM``'s offline embeddings and scores: prompts in, vectors out, over the same engine as generation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.frontend.inputs import Prompt, parse_prompts
from octavo.frontend.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledOutputs,
    ScoringOutput,
    ScoringRequestOutput,
    check_embedding_input,
    closing_tokens,
    cosine_pairs,
    pooling_params,
    pooling_request,
    resolve_truncation,
    truncate_beginning,
)
from octavo.garbage import rare_collections

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM


class Embedding:
    """Mixed into ``LLM``."""

    @rare_collections()  # making a thousand requests is enough to set off a full one
    def embed(
        self: LLM,
        prompts: Any,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, in the prompts' order: ``output.outputs.embedding``, or ``.data`` as a numpy array.

        prompts: as for ``generate``. dimensions: keep so many components. normalize: None does as the model does.
        truncate_prompt_tokens: use the beginning of longer prompts only; -1: as many tokens as fit.
        Raises RequestError for a prompt or parameter that can't be served; nothing runs then.
        """
        import numpy as np

        params = pooling_params(self.roles, self.model_config, dimensions=dimensions, normalize=normalize)
        keep = resolve_truncation(truncate_prompt_tokens, self.max_model_len)
        inputs = [self._embedding_input(p, i, keep) for i, p in enumerate(self._embedding_prompts(prompts))]
        ids = [str(next(self._ids)) for _ in inputs]
        now = time.time()
        state = PooledOutputs({request_id: i for i, request_id in enumerate(ids)})
        with self._batch():
            for request_id, token_ids in zip(ids, inputs, strict=True):
                self.engine.add_request(pooling_request(request_id, token_ids, params, arrival_time=now))
            self._embed_loop(state, len(ids) if use_tqdm else 0)
        if state.error is not None:
            raise RequestError(state.error, status=state.error_status)
        vectors = [np.frombuffer(v, "<f4") for v in state.vectors]
        return [EmbeddingRequestOutput(i, t, EmbeddingOutput(v)) for i, t, v in zip(ids, inputs, vectors, strict=True)]

    encode = embed

    def score(
        self: LLM, text_1: Any, text_2: Any, *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = False
    ) -> list[ScoringRequestOutput]:
        """Cosine similarity of pairs: one ``text_1`` with each ``text_2``, or as many of both, pair by pair."""
        first, second = parse_prompts(text_1, self.tokenizer), parse_prompts(text_2, self.tokenizer)
        if len(first) not in (1, len(second)):
            raise RequestError(f"{len(first)} text_1 can't be paired with {len(second)} text_2; give one text_1, or as many as text_2.")
        prompts = [{"prompt_token_ids": p.token_ids, "prompt": p.text} for p in (*first, *second)]
        outputs = self.embed(prompts, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)
        a, b = outputs[: len(first)], outputs[len(first) :]
        a = a * len(b) if len(a) == 1 else a
        scores = cosine_pairs([o.outputs.data.tobytes() for o in a], [o.outputs.data.tobytes() for o in b])
        return [
            ScoringRequestOutput(y.request_id, x.prompt_token_ids + y.prompt_token_ids, ScoringOutput(score))
            for x, y, score in zip(a, b, scores, strict=True)
        ]

    def _embedding_prompts(self: LLM, prompts: Any) -> list[Prompt]:
        """``parse_prompts``; a list of nothing but texts is tokenized at once, on all cores."""
        if self.tokenizer is None or not isinstance(prompts, (list, tuple)) or not all(isinstance(p, str) for p in prompts):
            return parse_prompts(prompts, self.tokenizer)
        ids = self.tokenizer.encode_batch(list(prompts))
        return [Prompt(text, tokens) for text, tokens in zip(prompts, ids, strict=True)]

    def _embedding_input(self: LLM, prompt: Prompt, index: int, keep: int | None) -> list[int]:
        closing = closing_tokens(self.tokenizer) if keep is not None and prompt.text is not None and self.tokenizer is not None else 0
        token_ids = truncate_beginning(prompt.token_ids, keep, closing)
        limits = {"max_model_len": self.max_model_len, "vocab_size": self.model_config.vocab_size}
        check_embedding_input(token_ids, f"prompts[{index}]", **limits)
        return token_ids

    def _embed_loop(self: LLM, state: PooledOutputs, shown: int) -> None:
        bar = None
        if shown:
            from tqdm import tqdm

            bar = tqdm(total=shown, desc="Embedded prompts", unit="req", dynamic_ncols=True)
        try:
            while self.engine.has_work():
                deltas = self.engine.step()
                for delta in deltas:
                    state.push(delta)
                if bar:
                    bar.update(len(deltas))
        finally:
            if bar:
                bar.close()
