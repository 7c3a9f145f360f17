"""What transformers' continuous batching reuses of prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

# Without a limit it takes all prompts into one forward pass, where none can reuse another's blocks yet. With one block
# a pass the first prompt is there when the next one begins.
TOKENS_A_PASS = 256
# Room for the whole document and a question, for each of eight prompts and more: 16,384 tokens.
BLOCKS = 64


def shared_prefix_tokens(model: PreTrainedModel, prompts: Sequence[torch.Tensor]) -> list[int]:
    """Tokens of each prompt, ids `[1, tokens]`, that `generate_batch` takes from blocks of an earlier one.

    Raises:
        ImportError: this version of transformers has no continuous batching, or another one.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(allow_block_sharing=True, num_blocks=BLOCKS, max_batch_tokens=TOKENS_A_PASS)
    with _counted_matches() as matches:
        outputs = model.generate_batch(
            [prompt[0].tolist() for prompt in prompts],
            continuous_batching_config=config,
            max_new_tokens=1,
            do_sample=False,
            eos_token_id=-1,
            progress_bar=False,
        )
    if len(outputs) != len(prompts):
        raise RuntimeError(f"generate_batch answered {len(outputs)} of {len(prompts)} prompts")
    return [*matches.values()]


@contextmanager
def _counted_matches() -> Iterator[dict[str, int]]:
    """Yields what gets the tokens that every request of a `with` block shares, which transformers only logs."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    matches: dict[str, int] = {}
    search = PagedAttentionCache.search_prefix_match

    def counted(self: PagedAttentionCache, request_id: str, prompt_ids: list[int]) -> int:
        matches[request_id] = search(self, request_id, prompt_ids)
        return matches[request_id]

    PagedAttentionCache.search_prefix_match = counted
    try:
        yield matches
    finally:
        PagedAttentionCache.search_prefix_match = search
