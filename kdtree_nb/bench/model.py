"""Tokens per second of a whole model: every decoder, the memory's floor, and transformers' ``generate``."""

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from kdtree_nb.bench.ceilings import Ceilings
from kdtree_nb.bench.engines import CACHE_ELEMENT, pass_bytes, prompt_of
from kdtree_nb.bench.timing import require_gpu
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine import Engine, Generation

PROMPT, NEW_TOKENS, REPEATS = 512, 256, 3
WAYS: tuple[tuple[str, int | str], ...] = (("ar", 0), ("chain", 16), ("ddtree", 16), ("ddtree", 32), ("ddtree", "auto"))
"""Decoders and their budgets."""
PEER_TOKENS = 16


class Run(NamedTuple):
    """A text, the median of three: new tokens a second after the prompt, and prompt tokens a second before."""

    decoder: str
    node_budget: int | str
    tokens_per_second: float
    acceptance_length: float
    target_forwards: int
    tokens: int
    prefill_tokens_per_second: float


def median_run(decoder: str, node_budget: int | str, prompt_tokens: int, runs: list[Generation]) -> Run:
    """The medians of the rates; the text is the same each time. A prompt's last token is not part of its prefill."""
    text = runs[0]
    return Run(
        decoder,
        node_budget,
        statistics.median(run.tokens_per_second for run in runs),
        text.acceptance_length,
        text.target_forwards,
        len(text.tokens),
        statistics.median((prompt_tokens - 1) / run.prefill_seconds for run in runs),
    )


def prompt_length(asked: int | None, capacity: int) -> int:
    """As many tokens as were asked for; by default 512, or what a small model has room for.

    Raises
    ------
    ValueError
        If the new tokens do not fit behind them.
    """
    most = capacity - NEW_TOKENS
    length = min(PROMPT, most) if asked is None else asked
    if not 2 <= length <= most:
        raise ValueError(
            f"bench model: --prompt-tokens {length}, expected 2 to {most}: "
            f"{NEW_TOKENS} new ones follow, and the model has room for {capacity}"
        )
    return length


def measure(engine: Engine, prompt_tokens: int) -> Iterator[Run]:
    """Continue the prompt by 256 tokens in every way.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    prompt = prompt_of(engine, prompt_tokens)
    for decoder, budget in WAYS:
        engine.generate(prompt, decoder, budget, NEW_TOKENS)  # loads weights, compiles, records graphs
        runs = [engine.generate(prompt, decoder, budget, NEW_TOKENS) for _ in range(REPEATS)]
        yield median_run(decoder, budget, prompt_tokens, runs)


def floor(engine: Engine, prompt_tokens: int, limits: Ceilings, dtype: str) -> float:
    """Tokens a second that plain decoding cannot pass: the bytes of a token's pass, halfway through the new tokens."""
    context = prompt_tokens + NEW_TOKENS // 2
    needed = pass_bytes(engine.config, engine.bundle.entries, 1, context, CACHE_ELEMENT[dtype])
    return 1e9 * limits.read_gb_per_s / needed


def memory_held() -> int:
    """Bytes of the GPU in use; those that CuPy keeps for later are given back before they are counted."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.Device().mem_info
    return int(total - free)


def transformers_tokens_per_second(config: ModelConfig, prompt_tokens: int, device: str = "cuda") -> float:
    """Greedy tokens a second of transformers' model of these sizes with random bfloat16 weights, without its prefill.

    Parameters
    ----------
    device : str
        Of torch.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = DeepseekV3Config(**config.to_hf() | {"eos_token_id": None})  # a text that does not end early
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = DeepseekV3ForCausalLM(sizes).eval()
            prompt = torch.randint(config.vocab_size, (1, prompt_tokens))
    finally:
        torch.set_default_dtype(usual)

    def seconds(tokens: int) -> float:
        started = time.perf_counter()
        attended = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=attended, do_sample=False, max_new_tokens=tokens)
        assert found.cpu().shape[1] == prompt_tokens + tokens
        return time.perf_counter() - started

    seconds(2)
    return (PEER_TOKENS - 1) / (seconds(PEER_TOKENS) - seconds(1))
