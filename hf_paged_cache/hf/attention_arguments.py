"""What models of transformers pass to their attention function, and what of it `"hf_paged"` takes.

An argument is honoured, or it is listed here with the reason why it changes nothing, or it is refused.
"""

import torch

from hf_paged_cache.errors import UnsupportedError

HONOURED = frozenset(
    {
        "query",
        "key",
        "value",
        "attention_mask",
        "dropout",
        "scaling",
        "is_causal",
        "softcap",
        "s_aux",
        "sinks",
        "position_bias",
        "indices",
        "block_indices",
        "output_attentions",
    }
)

# Of these eager attention, which defines the result, reads none.
WITHOUT_EFFECT = {
    "sliding_window": "the mask has the window",
    "position_ids": "keys and queries carry their positions, and the mask has packed sequences",
    "cache_position": "keys and queries carry their positions",
    "deterministic": "chooses among flash kernels",
    "num_items_in_batch": "for the loss",
    "output_hidden_states": "for the model's output",
    "output_router_logits": "for the model's output",
    "return_dict": "for the model's output",
    "use_cache": "the keys and values that come here are those of the cache already",
    "logits_to_keep": "for the model's head",
    "seq_idx": "for recurrent layers; the mask has packed sequences",
    "tokenizer": "for the stop strings of `generate`",
    "assistant_tokenizer": "for the drafts of `generate`",
}

_KNOWN = HONOURED | WITHOUT_EFFECT.keys()


def refuse_unknown(module: torch.nn.Module, arguments: dict[str, object]) -> None:
    """Checks the arguments of an attention call that no parameter takes.

    Raises:
        UnsupportedError: one is neither `None` nor known to change nothing.
    """
    if _KNOWN.issuperset(arguments):
        return
    for name in arguments.keys() - _KNOWN:
        if arguments[name] is not None:
            raise UnsupportedError(
                f'{type(module).__name__} passes {name!r} to its attention, an argument that "hf_paged" does not know, '
                "and without it the result could be wrong. Use another implementation, "
                'model.set_attn_implementation("eager") or "sdpa": a PagedCache works with any. If it is an argument '
                "of your own call of the model, leave it out"
            )
