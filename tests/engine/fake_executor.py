"""A slow, obvious device: it runs plans on rows and blocks, and stops at the first KV entry that is not the right one.

K and V of a token depend on all tokens up to it, so an entry is one number, the chain hash of the prefix that ends
there; entries that nobody wrote are distinct negative numbers. The "model" draws the next token as a hash of the whole
prefix and the seed, so what every request must produce is known without any schedule.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from octavo.types import Advance, GenerateRequest, StepPlan, StepResult, TokenLogprobs, TokenParams


def extend_chain(chain: list[int], tokens: list[int], adapter: int = 0) -> None:
    for token in tokens:
        chain.append(hash((chain[-1] if chain else adapter, token, len(chain))) & 0x7FFFFFFFFFFFFFFF)


def adapter_of(params: TokenParams) -> int:
    """Stands for whatever else K and V depend on, and a cache salt must tell apart."""
    return len(params.bad_words_token_ids)


def draw(chain_end: int, params: TokenParams, seed: int, vocab: int) -> int:
    return (hash((chain_end, seed if params.temperature else 0)) >> 7) % vocab


def logprob_of(chain_end: int, token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-float(hash((chain_end, token)) % 1000)], 1)


@dataclass
class Truth:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: int | None = None


def truth(request: GenerateRequest, seed: int, vocab: int, max_model_len: int) -> Truth:
    """What one sequence must produce: one token after the other, no batch, no cache, no blocks."""
    params, out, chain = request.params, Truth(), []
    extend_chain(chain, request.prompt_token_ids, adapter_of(params))
    while len(out.token_ids) < params.max_tokens and len(chain) < max_model_len:
        token = draw(chain[-1], params, seed, vocab)
        out.token_ids.append(token)
        out.logprobs.append(logprob_of(chain[-1], token))
        extend_chain(chain, [token])
        if len(out.token_ids) >= params.min_tokens and token in params.eos_token_ids + params.stop_token_ids:
            out.finish_reason = "stop"
            out.stop_reason = None if token in params.eos_token_ids else token
            break
    return out


def prompt_truth(request: GenerateRequest) -> list[TokenLogprobs]:
    prompt, chain = request.prompt_token_ids, []
    extend_chain(chain, prompt, adapter_of(request.params))
    return [logprob_of(chain[i], prompt[i + 1]) for i in range(len(prompt) - 1)]


@dataclass
class Row:
    params: TokenParams
    seed: int
    num_prompt: int
    tokens: list[int]
    chain: list[int]
    table: list[int]
    has_drawn: bool = False


class FakeExecutor:
    """``lazy``: a step is run when it is collected, so a plan that changes after its submission is found out."""

    whole_prompts = False
    swap_block_s = 0.0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        budget: int,
        vocab: int,
        steps_ahead: int,
        lazy: bool = False,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.steps_ahead, self.num_blocks, self.block_size = steps_ahead, num_blocks, block_size
        self.num_cpu_blocks = num_cpu_blocks
        self.max_rows, self.budget, self.vocab, self.lazy = max_rows, budget, vocab, lazy
        self.kv = [[-1 - block * block_size - i for i in range(block_size)] for block in range(num_blocks)]
        self.cpu_kv: list[list[int]] = [[-1] * block_size] * num_cpu_blocks
        self.num_spoilt = num_blocks * block_size
        self.rows: list[Row | None] = [None] * max_rows
        self.pending: deque[StepPlan | StepResult] = deque()
        self.fail_row = lambda plan: None  # the row to report an error for
        self.on_submit = lambda plan: None
        self.plans: list[StepPlan] = []
        self.running = True

    def submit(self, plan: StepPlan) -> None:
        assert len(self.pending) <= self.steps_ahead
        self.plans.append(plan)
        self.on_submit(plan)
        self.pending.append(plan if self.lazy else self._run(plan))

    def collect(self) -> StepResult:
        oldest = self.pending.popleft()
        return self._run(oldest) if isinstance(oldest, StepPlan) else oldest

    def forget(self) -> None:
        self.pending.clear()

    def shutdown(self) -> None:
        self.running = False

    def _run(self, plan: StepPlan) -> StepResult:
        self._swap_blocks(plan)
        self._copy_blocks(plan)
        for init in plan.row_inits:
            tokens = init.prompt_token_ids + init.output_token_ids
            chain: list[int] = []
            extend_chain(chain, tokens, adapter_of(init.params))
            assert 0 <= init.seed < 2**63
            self.rows[init.row] = Row(init.params, init.seed, len(init.prompt_token_ids), tokens, chain, list(init.block_ids))
        for append in plan.block_appends:
            table = self.rows[append.row].table
            assert append.offset <= len(table), "a hole in a block table"
            table[append.offset : append.offset + len(append.block_ids)] = append.block_ids
        self._forward(plan)
        return self._sample(plan)

    def _swap_blocks(self, plan: StepPlan) -> None:
        """Out, then in. What came in is spoilt in CPU memory, so that nobody can rely on it longer."""
        targets = {target for _, target in plan.swap_ins}
        places = {place for _, place in plan.swap_outs}
        assert len(targets) == len(plan.swap_ins) and len(places) == len(plan.swap_outs), "moves must not depend on their order"
        assert len({place for place, _ in plan.swap_ins}) == len(targets), "a CPU block has one owner"
        moves = plan.swap_outs + [(block, place) for place, block in plan.swap_ins]
        assert all(0 <= block < self.num_blocks and 0 <= place < self.num_cpu_blocks for block, place in moves)
        assert not targets & {block for pair in plan.copies for block in pair}, "a block comes in to one that is copied"
        for block, place in plan.swap_outs:
            self.cpu_kv[place] = list(self.kv[block])
        for place, block in plan.swap_ins:
            self.kv[block] = self.cpu_kv[place]
            self.num_spoilt += self.block_size
            self.cpu_kv[place] = [-1 - self.num_spoilt - i for i in range(self.block_size)]

    def _copy_blocks(self, plan: StepPlan) -> None:
        sources, targets = {s for s, _ in plan.copies}, [t for _, t in plan.copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets), "copies must not depend on their order"
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])

    def _forward(self, plan: StepPlan) -> None:
        counts = [a.count for a in plan.advances]
        assert counts and min(counts) >= 1 and counts == sorted(counts, key=lambda c: c > 1), "advances of one token come first"
        assert sum(counts) <= self.budget
        assert len({a.row for a in plan.advances}) == len(counts), "a row advances twice"
        for advance in plan.advances:
            self._check_advance(advance)
        written: set[int] = set()
        for advance in plan.advances:
            row = self.rows[advance.row]
            for position in range(advance.start, advance.start + advance.count):
                block, offset = row.table[position // self.block_size], position % self.block_size
                assert block * self.block_size + offset not in written, "two sequences write the same slot"
                written.add(block * self.block_size + offset)
                self.kv[block][offset] = row.chain[position]

    def _check_advance(self, advance: Advance) -> None:
        row = self.rows[advance.row]
        assert row is not None, "a row that was never initialized"
        end = advance.start + advance.count
        if advance.token_ids is None:
            assert row.has_drawn and advance.count == 1 and end == len(row.tokens), "not the row's newest token"
        else:
            assert advance.token_ids == row.tokens[advance.start : end] and len(advance.token_ids) == advance.count
        # Before anything of this step is written: what it reads must come from earlier steps.
        self._check_kv(row, advance.start)
        assert len(row.table) * self.block_size >= end

    def _check_kv(self, row: Row, length: int) -> None:
        size = self.block_size
        for i in range(-(-length // size)):
            here = min(size, length - i * size)
            assert self.kv[row.table[i]][:here] == row.chain[i * size : i * size + here], f"wrong KV in block {row.table[i]}"

    def _sample(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step, [], [], [])
        for advance in plan.advances:
            runner = self.rows[advance.row]
            end = advance.start + advance.count
            if advance.prompt_logprobs is not None:
                following = advance.next_token_ids
                assert following and following == runner.tokens[advance.start + 1 : min(end + 1, runner.num_prompt)]
                entries = [logprob_of(runner.chain[advance.start + i], token) for i, token in enumerate(following)]
                result.prompt_logprobs[advance.row] = entries
            for number in advance.sample_rows:
                row = self.rows[number]
                assert row.chain[:end] == runner.chain[:end] and len(row.tokens) == end
                self._check_kv(row, end)
                token = draw(row.chain[-1], row.params, row.seed, self.vocab)
                result.rows.append(number)
                result.token_ids.append(token)
                result.logprobs.append(None if row.params.logprobs is None else logprob_of(row.chain[-1], token))
                row.tokens.append(token)
                extend_chain(row.chain, [token])
                row.has_drawn = True
        failing = self.fail_row(plan)
        if failing is not None:
            result.errors[failing] = "the row's logits are not finite"
        return result
